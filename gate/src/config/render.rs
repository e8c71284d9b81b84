//! Settings as TOML text, with their documentation as comments.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::PathBuf;

use super::session_limit::SessionLimit;
use super::settings::{
    BackendSettings, DatabaseSettings, LimitSettings, ListenerSettings, Settings, TimeoutSettings,
    WorkerSettings,
};
use super::value::{
    AdminValue, CountValue, DurationValue, KernelMode, LimitValue, LogFormat, PinValue,
};
use gate_common::limit::Setting;

/// The settings as TOML. It reads back as the same settings.
#[must_use]
pub fn to_toml(settings: &Settings) -> String {
    let mut out = Text::default();
    out.comment(Settings::ABOUT);
    settings.render_settings(&mut out);
    out.text
}

/// Limits as the `[limits]` tables of a configuration file, without comments.
#[must_use]
pub fn limits_to_toml(limits: &LimitSettings) -> String {
    let mut out = Text {
        bare: true,
        ..Text::default()
    };
    limits.render(&mut out, "limits", &[], "");
    out.text
}

/// A limit as a TOML value.
#[must_use]
pub fn limit(value: LimitValue) -> String {
    value.to_toml()
}

/// The text so far, and the table it is in.
#[derive(Default)]
pub(super) struct Text {
    text: String,
    path: Vec<String>,
    /// Values only: no comments, and nothing that is not set.
    bare: bool,
}

impl Text {
    fn comment(&mut self, lines: &[&str]) {
        if !self.bare {
            for line in lines {
                self.line(&format!("#{line}"));
            }
        }
    }

    fn line(&mut self, line: &str) {
        self.text.push_str(line.trim_end());
        self.text.push('\n');
    }

    /// A blank line before what follows, unless this is the beginning.
    fn gap(&mut self) {
        if !self.text.is_empty() && !self.text.ends_with("\n\n") {
            self.text.push('\n');
        }
    }

    fn setting(&mut self, key: &str, docs: &[&str], value: &str) {
        if !self.bare {
            self.gap();
        }
        self.comment(docs);
        self.line(&format!("{} = {value}", quoted_key(key)));
    }

    fn absent(&mut self, docs: &[&str], example: &str) {
        if self.bare {
            return;
        }
        self.gap();
        self.comment(docs);
        for line in example.lines() {
            self.line(&format!("# {line}"));
        }
    }

    fn table(&mut self, key: &str, docs: &[&str], inside: impl FnOnce(&mut Self)) {
        self.header(key, docs, ("[", "]"), inside);
    }

    fn header(
        &mut self,
        key: &str,
        docs: &[&str],
        (open, close): (&str, &str),
        inside: impl FnOnce(&mut Self),
    ) {
        self.gap();
        self.comment(docs);
        self.path.push(quoted_key(key));
        self.line(&format!("{open}{}{close}", self.path.join(".")));
        inside(self);
        self.path.pop();
    }
}

/// How a setting of some type is printed.
pub(super) trait Render {
    /// Prints a setting: its documentation and its value, or `example` if it
    /// is not set.
    fn render(&self, out: &mut Text, key: &str, docs: &[&str], example: &str);
}

/// A table of settings.
pub(super) trait Table {
    /// What the table is for: its documentation, line by line.
    const ABOUT: &'static [&'static str];

    /// Prints every setting of the table with its documentation.
    fn render_settings(&self, out: &mut Text);
}

/// A value that fits on one line.
trait Scalar {
    fn to_toml(&self) -> String;
}

impl<T: Scalar> Render for T {
    fn render(&self, out: &mut Text, key: &str, docs: &[&str], _example: &str) {
        out.setting(key, docs, &self.to_toml());
    }
}

impl<T: Scalar> Render for Option<T> {
    fn render(&self, out: &mut Text, key: &str, docs: &[&str], example: &str) {
        match self {
            Some(value) => out.setting(key, docs, &value.to_toml()),
            None => out.absent(docs, &format!("{key} = {example}")),
        }
    }
}

impl<T: Scalar> Render for BTreeMap<String, T> {
    fn render(&self, out: &mut Text, key: &str, docs: &[&str], example: &str) {
        if self.is_empty() {
            return out.absent(docs, example);
        }
        out.table(key, docs, |out| {
            for (name, value) in self {
                out.line(&format!("{} = {}", quoted_key(name), value.to_toml()));
            }
        });
    }
}

impl Render for Vec<ListenerSettings> {
    fn render(&self, out: &mut Text, key: &str, docs: &[&str], _example: &str) {
        for (index, listener) in self.iter().enumerate() {
            let docs = if index == 0 { docs } else { &[] };
            out.header(key, docs, ("[[", "]]"), |out| listener.render_settings(out));
        }
    }
}

macro_rules! render_tables {
    ($($table:ident)*) => {$(
        impl Render for $table {
            fn render(&self, out: &mut Text, key: &str, docs: &[&str], _example: &str) {
                out.table(key, docs, |out| self.render_settings(out));
            }
        }
    )*};
}
render_tables!(LimitSettings TimeoutSettings WorkerSettings);

macro_rules! render_maps_of_tables {
    ($($table:ident)*) => {$(
        impl Render for BTreeMap<String, $table> {
            fn render(&self, out: &mut Text, key: &str, docs: &[&str], example: &str) {
                if self.is_empty() {
                    return out.absent(docs, example);
                }
                out.path.push(key.to_owned());
                for (index, (name, table)) in self.iter().enumerate() {
                    let docs = if index == 0 { docs } else { &[] };
                    out.table(name, docs, |out| table.render_settings(out));
                }
                out.path.pop();
            }
        }
    )*};
}
render_maps_of_tables!(BackendSettings DatabaseSettings);

impl Scalar for String {
    fn to_toml(&self) -> String {
        quoted(self)
    }
}

impl Scalar for Vec<String> {
    fn to_toml(&self) -> String {
        let items: Vec<String> = self.iter().map(|item| quoted(item)).collect();
        format!("[{}]", items.join(", "))
    }
}

impl Scalar for u32 {
    fn to_toml(&self) -> String {
        self.to_string()
    }
}

impl Scalar for PathBuf {
    fn to_toml(&self) -> String {
        quoted(&self.to_string_lossy())
    }
}

impl Scalar for LimitValue {
    fn to_toml(&self) -> String {
        match self.0 {
            Setting::AtMost(number) => number.to_string(),
            Setting::Unlimited => "0".to_owned(),
            Setting::Inherit | Setting::None | Setting::Auto => quoted(&self.to_string()),
        }
    }
}

impl Scalar for SessionLimit {
    fn to_toml(&self) -> String {
        let max = self.max.to_toml();
        if self.wait.0.is_zero() && self.max_waiting.is_none() {
            return max;
        }
        let waiting = self
            .max_waiting
            .map(|count| format!(", max_waiting = {count}"));
        let wait = self.wait.to_toml();
        format!(
            "{{ max = {max}, wait = {wait}{} }}",
            waiting.unwrap_or_default()
        )
    }
}

impl Scalar for DurationValue {
    fn to_toml(&self) -> String {
        quoted(&self.to_string())
    }
}

impl Scalar for CountValue {
    fn to_toml(&self) -> String {
        match self {
            Self::Auto => quoted("auto"),
            Self::Number(number) => number.to_string(),
        }
    }
}

impl Scalar for PinValue {
    fn to_toml(&self) -> String {
        match self {
            Self::None => quoted("none"),
            Self::Cpus => quoted("cpus"),
            Self::List(cpus) => format!("{cpus:?}"),
            Self::Nic(device) => quoted(&format!("nic:{device}")),
        }
    }
}

impl Scalar for AdminValue {
    fn to_toml(&self) -> String {
        match self {
            Self::Off => quoted("off"),
            Self::At(address) => quoted(address),
        }
    }
}

impl Scalar for KernelMode {
    fn to_toml(&self) -> String {
        quoted(match self {
            Self::Auto => "auto",
            Self::Required => "required",
            Self::Off => "off",
        })
    }
}

impl Scalar for LogFormat {
    fn to_toml(&self) -> String {
        quoted(match self {
            Self::Text => "text",
            Self::Json => "json",
        })
    }
}

/// A TOML key: bare if it may be.
fn quoted_key(key: &str) -> String {
    let bare = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-';
    if !key.is_empty() && key.bytes().all(bare) {
        key.to_owned()
    } else {
        quoted(key)
    }
}

/// A TOML string: literal if it has a backslash, so that escaped names read
/// as `gatectl` shows them.
fn quoted(text: &str) -> String {
    if text.contains('\\') && !text.contains(|c: char| c == '\'' || c.is_control()) {
        return format!("'{text}'");
    }
    let mut out = String::from("\"");
    for character in text.chars() {
        match character {
            '"' | '\\' => {
                out.push('\\');
                out.push(character);
            }
            control if control.is_control() => {
                let _ = write!(out, "\\u{:04X}", u32::from(control));
            }
            other => out.push(other),
        }
    }
    out.push('"');
    out
}
