//! Addresses of TCP, from text.
#![forbid(unsafe_code)]

use std::fmt;
use std::net::{SocketAddr, ToSocketAddrs};

use super::ConfigError;
use super::validate::invalid;

/// The first address of TCP that a text stands for.
pub(super) fn resolve(setting: &str, text: &str, cure: &str) -> Result<SocketAddr, ConfigError> {
    if text.starts_with('/') {
        return Err(invalid(
            setting,
            format!("`{text}`: a unix socket is possible for a backend only"),
            "use host:port",
        ));
    }
    let unresolved = |cause: &dyn fmt::Display| {
        invalid(setting, format!("`{text}` is no address: {cause}"), cure)
    };
    // What the standard library says of it is `invalid socket address`.
    let Some((host, port)) = text.rsplit_once(':') else {
        return Err(unresolved(&"it has no port"));
    };
    if port.parse::<u16>().is_err() {
        return Err(unresolved(&format!("`{port}` is no port")));
    }
    if host.is_empty() {
        return Err(unresolved(&"it has no host"));
    }
    match text.to_socket_addrs() {
        Ok(mut addresses) => addresses
            .next()
            .ok_or_else(|| unresolved(&"the name has none")),
        Err(error) => Err(unresolved(&error)),
    }
}
