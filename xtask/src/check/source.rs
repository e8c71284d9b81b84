//! Rust source reduced to what the house rules look at: code, without comments and literals.

/// Replaces comments and the contents of string and character literals by blanks. Line breaks
/// stay, so that a line number of the result is one of the source.
pub fn code_only(source: &str) -> String {
    let chars: Vec<char> = source.chars().collect();
    let mut code = String::with_capacity(source.len());
    let mut at = 0;
    while at < chars.len() {
        let end = skipped_until(&chars, at);
        if end == at {
            code.push(chars[at]);
            at += 1;
        } else {
            let blank = |c: &char| if *c == '\n' { '\n' } else { ' ' };
            code.extend(chars[at..end].iter().map(blank));
            at = end;
        }
    }
    code
}

/// The lines of `code`, counted from 1, in which `name` stands as a whole: no identifier
/// character touches it. A path such as `Instant::now` is a name too.
pub fn lines_naming(code: &str, name: &str) -> Vec<usize> {
    let part = |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() || c == '_');
    let whole = |line: &str| {
        line.match_indices(name).any(|(at, _)| {
            !part(line[..at].chars().next_back()) && !part(line[at + name.len()..].chars().next())
        })
    };
    code.lines()
        .enumerate()
        .filter(|(_, line)| whole(line))
        .map(|(index, _)| index + 1)
        .collect()
}

/// The end of the comment or literal that begins at `at`; `at` itself if none does.
fn skipped_until(chars: &[char], at: usize) -> usize {
    let starts = |text: &str| {
        text.chars()
            .eq(chars[at..].iter().copied().take(text.len()))
    };
    let in_word = at > 0 && (chars[at - 1].is_alphanumeric() || chars[at - 1] == '_');
    if starts("//") {
        line_end(chars, at)
    } else if starts("/*") {
        block_end(chars, at)
    } else if starts("\"") {
        quoted_end(chars, at + 1, '"')
    } else if !in_word && (starts("r\"") || starts("r#") || starts("br\"") || starts("br#")) {
        raw_end(chars, at)
    } else if starts("'") {
        character_end(chars, at)
    } else {
        at
    }
}

fn line_end(chars: &[char], at: usize) -> usize {
    let length = chars[at..].iter().position(|c| *c == '\n');
    length.map_or(chars.len(), |length| at + length)
}

/// Block comments nest.
fn block_end(chars: &[char], at: usize) -> usize {
    let mut depth = 0;
    let mut i = at;
    while i + 1 < chars.len() {
        match (chars[i], chars[i + 1]) {
            ('/', '*') => (depth, i) = (depth + 1, i + 2),
            ('*', '/') => (depth, i) = (depth - 1, i + 2),
            _ => i += 1,
        }
        if depth == 0 {
            return i;
        }
    }
    chars.len()
}

fn quoted_end(chars: &[char], from: usize, quote: char) -> usize {
    let mut i = from;
    while i < chars.len() && chars[i] != quote {
        i += if chars[i] == '\\' { 2 } else { 1 };
    }
    (i + 1).min(chars.len())
}

/// A raw string ends at a quote with as many hashes as it began with. `r#name` is no string.
fn raw_end(chars: &[char], at: usize) -> usize {
    let prefix = if chars[at] == 'b' { 2 } else { 1 };
    let hashes = chars[at + prefix..]
        .iter()
        .take_while(|c| **c == '#')
        .count();
    let open = at + prefix + hashes;
    if chars.get(open) != Some(&'"') {
        return at;
    }
    let closes = |i: &usize| {
        chars[*i] == '"' && chars[i + 1..].iter().take_while(|c| **c == '#').count() >= hashes
    };
    let close = (open + 1..chars.len()).find(closes);
    close.map_or(chars.len(), |i| i + 1 + hashes)
}

/// `'x'` and `'\n'` are literals, `'static` is a lifetime.
fn character_end(chars: &[char], at: usize) -> usize {
    match (chars.get(at + 1), chars.get(at + 2)) {
        (Some('\\'), _) => quoted_end(chars, at + 1, '\''),
        (Some(_), Some('\'')) => at + 3,
        _ => at,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_and_literals_are_blank_and_code_stays() {
        for (source, expected) in [
            ("a // b\nc", "a     \nc"),
            ("a /* b /* c */ \n d */ e", "a              \n      e"),
            (r#"f("un\"safe") g"#, "f(          ) g"),
            (r##"f(r#"a"b"#) g"##, "f(        ) g"),
            ("r#type + bar\"x\"", "r#type + bar   "),
            ("x::<'a>('b', '\\'', '\"') y", "x::<'a>(   ,     ,    ) y"),
            ("unterminated \"abc", "unterminated     "),
        ] {
            assert_eq!(code_only(source), expected, "{source}");
        }
    }

    #[test]
    fn names_match_as_a_whole() {
        let code = "use aya::Ebpf;\nuse aya_ebpf::x;\nlet maya = 1;\nInstant::now()";
        assert_eq!(lines_naming(code, "aya"), [1]);
        assert_eq!(lines_naming(code, "aya_ebpf"), [2]);
        assert_eq!(lines_naming(code, "Instant::now"), [4]);
        assert_eq!(lines_naming(code, "unsafe"), [0; 0]);
    }
}
