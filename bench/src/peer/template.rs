//! Configurations with `{{name}}` where a value belongs.

use anyhow::{Context, Result, bail};

/// Fills a template in.
///
/// # Errors
/// A placeholder without a value, a value without a placeholder, or a `{{` that
/// is not closed: the template and its caller do not fit each other.
pub fn fill(template: &str, values: &[(&str, String)]) -> Result<String> {
    let mut filled = String::with_capacity(template.len());
    let mut used = vec![false; values.len()];
    let mut rest = template;
    while let Some((before, behind)) = rest.split_once("{{") {
        let (name, after) = behind
            .split_once("}}")
            .with_context(|| format!("a template has a {{{{ without }}}} before {behind:.20?}"))?;
        let Some(index) = values.iter().position(|(known, _)| *known == name) else {
            bail!("a template has the placeholder {name:?}, which has no value");
        };
        used[index] = true;
        filled.push_str(before);
        filled.push_str(&values[index].1);
        rest = after;
    }
    filled.push_str(rest);
    match used.iter().position(|used| !used) {
        None => Ok(filled),
        Some(index) => bail!("a template has no placeholder {:?}", values[index].0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled(template: &str) -> Result<String> {
        fill(
            template,
            &[("a", "1".to_owned()), ("b", "{{a}}".to_owned())],
        )
    }

    #[test]
    fn values_are_put_in_as_they_are() {
        let text = filled("x {{a}}{{b}} {y} {{a}}").unwrap();
        assert_eq!(text, "x 1{{a}} {y} 1");
    }

    #[test]
    fn template_and_values_must_fit() {
        for (template, complaint) in [
            ("{{a}} {{b}} {{c}}", "placeholder \"c\", which has no value"),
            ("{{a}}", "no placeholder \"b\""),
            ("{{a}} {{b", "without }}"),
        ] {
            let error = filled(template).unwrap_err().to_string();
            assert!(error.contains(complaint), "{template}: {error}");
        }
    }
}
