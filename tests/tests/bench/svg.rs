//! Whether a plot is XML.

const CDATA: &str = "![CDATA[";

use anyhow::{Context as _, Result, bail, ensure};

/// Every element that begins ends, in order, and there is nothing around them;
/// attributes are quoted, and bare ampersands are none.
pub fn expect_well_formed(text: &str) -> Result<()> {
    let mut open: Vec<&str> = Vec::new();
    let mut rest = text.trim();
    let mut elements = 0;
    while !rest.is_empty() {
        let Some(begin) = rest.find('<') else {
            bail!("text after the end: {rest:?}");
        };
        let between = &rest[..begin];
        expect_escaped(between)?;
        ensure!(
            !open.is_empty() || between.trim().is_empty(),
            "text around the elements"
        );
        rest = &rest[begin + 1..];
        if let Some(comment) = rest.strip_prefix("!--") {
            rest = comment
                .split_once("-->")
                .context("a comment without an end")?
                .1;
            continue;
        }
        if let Some(data) = rest.strip_prefix(CDATA) {
            ensure!(!open.is_empty(), "text around the elements");
            rest = data.split_once("]]>").context("data without an end")?.1;
            continue;
        }
        let (tag, after) = rest.split_once('>').context("a tag without an end")?;
        rest = after;
        if tag.starts_with(['?', '!']) {
            continue;
        }
        ensure!(
            tag.matches('"').count().is_multiple_of(2),
            "quotes in <{tag}>"
        );
        expect_escaped(tag)?;
        if let Some(name) = tag.strip_prefix('/') {
            let last = open.pop();
            ensure!(last == Some(name.trim()), "</{name}> ends {last:?}");
            continue;
        }
        elements += 1;
        let name = tag.split([' ', '\n', '/']).next().unwrap_or_default();
        ensure!(!name.is_empty(), "a tag without a name");
        if !tag.ends_with('/') {
            ensure!(!open.is_empty() || elements == 1, "two roots");
            open.push(name);
        }
    }
    ensure!(open.is_empty(), "without an end: {open:?}");
    ensure!(text.contains("<svg"), "no <svg>");
    Ok(())
}

fn expect_escaped(text: &str) -> Result<()> {
    for (at, _) in text.match_indices('&') {
        let entity = text[at + 1..].split(';').next().unwrap_or_default();
        let is_entity =
            entity.starts_with('#') || ["amp", "lt", "gt", "quot", "apos"].contains(&entity);
        ensure!(is_entity, "a bare ampersand: {text:?}");
    }
    Ok(())
}
