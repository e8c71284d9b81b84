//! `gatectl limits list`.

use gate::control::api::LimitEntry;
use gate::control::limits;

use crate::output::{Output, Table, limit};
use crate::target::{Failure, Target};

pub fn run(target: &Target, output: Output) -> Result<(), Failure> {
    let listed = target.read("/limits", |ledger| {
        limits::list(ledger).map_err(Failure::new)
    })?;
    output.print(&listed, |listed: &Vec<_>| {
        let mut table = Table::new(["LIMIT", "NAME", "VALUE", "USED", "SOURCE"]);
        for entry in listed {
            table.row([
                entry.key.clone(),
                entry.name.clone().unwrap_or_default(),
                limit(entry.limit.get()),
                entry.used.map_or("-".to_owned(), |used| used.to_string()),
                source(entry),
            ]);
        }
        table.render()
    })
}

fn source(entry: &LimitEntry) -> String {
    if entry.inactive {
        format!("{}, not enforced", entry.source)
    } else {
        entry.source.clone()
    }
}
