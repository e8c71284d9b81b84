//! How sessions with a backend end.

use super::*;

/// A session past ReadyForQuery, with deadlines of its own.
fn established_with(deadlines: Deadlines) -> Session {
    let mut session = Session::new(deadlines, None);
    session.start(&mut Vec::new());
    for input in [
        Input::ClientData(&startup_packet()),
        Input::Admission(Ok(())),
        Input::Connected,
        Input::BackendData(&login_bytes()),
    ] {
        session.handle(input, &mut Vec::new());
    }
    session
}

#[test]
fn a_client_that_resets_in_mid_query_holds_its_slot_until_the_backend_ended() {
    let mut driver = established();
    driver.feed(Input::ClientLost, Ok(()));
    assert!(!driver.closed);
    assert!(driver.has(&Action::CancelQuery(cancel_packet())));
    assert!(driver.has(&Action::EndBackend));
    driver.feed(Input::BackendEnded, Ok(()));
    assert!(driver.closed);
    assert_eq!(driver.counts(), [Count::Closed(CloseReason::ClientReset)]);
}

/// The first may come before the query does, and is ignored then.
#[test]
fn a_backend_that_does_not_end_for_a_cancel_gets_another_one() {
    for (abandoned, left) in [(60_000, Some(59_000)), (1_000, None), (300, None)] {
        let abandoned = Duration::from_millis(abandoned);
        let deadlines = Deadlines {
            abandoned,
            ..DEADLINES
        };
        let mut session = established_with(deadlines);
        let mut out = Vec::new();
        session.handle(Input::ClientLost, &mut out);
        let cancel = Action::CancelQuery(cancel_packet());
        assert!(out.contains(&cancel));
        assert!(out.contains(&Action::Deadline(Some(abandoned.min(CANCEL_AGAIN)))));
        out.clear();
        session.handle(Input::DeadlinePassed, &mut out);
        assert!(out.contains(&cancel));
        if let Some(left) = left {
            let left = Action::Deadline(Some(Duration::from_millis(left)));
            assert_eq!(out, [cancel, left]);
            out.clear();
            session.handle(Input::DeadlinePassed, &mut out);
            assert_eq!(out.len(), 3, "{out:?}");
        }
        let ended = Action::Count(Count::Closed(CloseReason::AbandonedTimeout));
        assert!(out.contains(&ended), "{out:?}");
    }
}

#[test]
fn g1_a_half_close_holds_the_slot_and_sends_fin_once() {
    let mut driver = established();
    driver.feed(Input::ClientEnded, Ok(()));
    driver.feed(Input::ClientEnded, Ok(()));
    driver.feed(Input::ClientLost, Ok(()));
    assert!(!driver.closed);
    assert_eq!(driver.backend_ended, 1);
}

#[test]
fn a_login_that_the_server_refuses_counts_the_same_whoever_closes_first() {
    let error = b"E\0\0\0\x05\0";
    let ends: [&[Input<'_>]; 3] = [
        &[Input::BackendEnded],
        &[Input::ClientEnded, Input::BackendEnded],
        &[Input::ClientLost, Input::BackendEnded],
    ];
    for inputs in ends {
        let mut driver = Driver::new(None);
        driver.feed(Input::ClientData(&startup_packet()), Ok(()));
        driver.feed(Input::Connected, Ok(()));
        driver.feed(Input::BackendData(error), Ok(()));
        for input in inputs {
            driver.feed(*input, Ok(()));
        }
        assert_eq!(driver.counts(), [Count::Closed(CloseReason::LoginFailed)]);
    }
}

#[test]
fn a1_every_way_a_login_can_fail_closes_once() {
    let failures: [(&[Input<'_>], CloseReason); 5] = [
        (
            &[Input::ConnectFailed(ConnectFailure::Refused)],
            CloseReason::ConnectFailed,
        ),
        (&[Input::DeadlinePassed], CloseReason::ConnectFailed),
        (
            &[Input::Connected, Input::BackendLost],
            CloseReason::LoginFailed,
        ),
        (
            &[Input::Connected, Input::BackendEnded],
            CloseReason::LoginFailed,
        ),
        (
            &[Input::Connected, Input::DeadlinePassed],
            CloseReason::AuthTimeout,
        ),
    ];
    for (inputs, reason) in failures {
        let mut driver = Driver::new(None);
        driver.feed(Input::ClientData(&startup_packet()), Ok(()));
        for input in inputs {
            driver.feed(*input, Ok(()));
        }
        driver.feed(Input::ClientEnded, Ok(()));
        assert!(driver.closed, "{reason:?}");
        assert_eq!(driver.counts().last(), Some(&Count::Closed(reason)));
    }
}

#[test]
fn g1_a_half_closed_session_may_be_silent_for_so_long_only() {
    let deadlines = Deadlines {
        half_close: Duration::from_secs(7),
        ..DEADLINES
    };
    let mut session = established_with(deadlines);
    let mut out = Vec::new();
    session.handle(Input::ClientEnded, &mut out);
    assert!(out.contains(&Action::Deadline(Some(deadlines.half_close))));
    assert_eq!(session.quiet_time(&deadlines), Some(deadlines.half_close));
    out.clear();
    session.handle(Input::DeadlinePassed, &mut out);
    assert!(out.contains(&Action::CancelQuery(cancel_packet())));
    out.clear();
    session.handle(Input::BackendEnded, &mut out);
    let ended = Action::Count(Count::Closed(CloseReason::HalfCloseTimeout));
    assert!(out.contains(&ended), "{out:?}");
}
