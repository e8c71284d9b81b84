//! Messages of clients, of which only the beginnings matter.

use anyhow::{Context, Result};

use crate::wire;

/// The beginning of a message, as far as it has come in. The rest does not matter.
#[derive(Default)]
pub struct Inbox {
    head: [u8; wire::HEADER_BYTES + wire::COMMAND_BYTES],
    have: usize,
    /// Of the message, after its head.
    skip: usize,
}

/// What a whole message asks for.
pub enum Asked {
    /// A Query, and how it begins.
    Query([u8; wire::COMMAND_BYTES]),
    /// The end.
    Terminate,
    /// Nothing that is answered.
    Other,
}

impl Inbox {
    /// Takes bytes up to the end of a message; `None`: it has not ended yet.
    ///
    /// # Errors
    /// It is shorter than its header.
    pub fn take(&mut self, bytes: &mut &[u8]) -> Result<Option<Asked>> {
        if self.skip == 0 {
            self.fill(bytes, wire::HEADER_BYTES);
            if self.have < wire::HEADER_BYTES {
                return Ok(None);
            }
            let head = self.head_bytes()?;
            self.fill(bytes, head);
            if self.have < head {
                return Ok(None);
            }
            self.skip = self.message_bytes()? - head;
        }
        let skipped = self.skip.min(bytes.len());
        *bytes = &bytes[skipped..];
        self.skip -= skipped;
        if self.skip > 0 {
            return Ok(None);
        }
        let whole = std::mem::take(self);
        let (header, command) = whole.head.split_at(wire::HEADER_BYTES);
        Ok(Some(match header[0] {
            b'Q' => Asked::Query(command.try_into()?),
            b'X' => Asked::Terminate,
            _ => Asked::Other,
        }))
    }

    fn fill(&mut self, bytes: &mut &[u8], until: usize) {
        let taken = until.saturating_sub(self.have).min(bytes.len());
        let (head, rest) = bytes.split_at(taken);
        self.head[self.have..self.have + taken].copy_from_slice(head);
        self.have += taken;
        *bytes = rest;
    }

    fn message_bytes(&self) -> Result<usize> {
        let (header, _) = self.head.split_first_chunk().context("no header")?;
        wire::message_bytes(header).context("a message shorter than its header")
    }

    fn head_bytes(&self) -> Result<usize> {
        Ok(self.message_bytes()?.min(self.head.len()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_in_parts_is_one_message() {
        let mut whole = wire::request(64, 200);
        whole.extend(wire::query("select 1"));
        for cut in 1..whole.len() {
            let mut inbox = Inbox::default();
            let mut asked = Vec::new();
            for mut part in [&whole[..cut], &whole[cut..]] {
                while let Some(Asked::Query(command)) = inbox.take(&mut part).unwrap() {
                    asked.push(wire::reply_bytes(&command));
                }
                assert!(part.is_empty());
            }
            assert_eq!(asked, [Some(200), None], "cut at {cut}");
        }
    }
}
