from winnow.sampling.prefix import ClosedPrefix


def test_qualified_groups_are_passed_once_every_earlier_group_is_closed() -> None:
    prefix = ClosedPrefix(0.98)
    assert prefix.close(2, "c", "qualified") == []
    assert prefix.close(1, "b", "not") == []
    assert prefix.close(0, "a", "qualified") == [0, 2]
    assert prefix.close(3, "d", "qualified") == [3]


def test_the_estimate_learns_in_admission_order() -> None:
    shuffled, ordered = ClosedPrefix(0.5), ClosedPrefix(0.5)
    outcomes = [(0, "a", "qualified"), (1, "b", "not"), (2, "a", "not"), (3, "c", "qualified")]
    for outcome in outcomes:
        ordered.close(*outcome)  # type: ignore[arg-type]
    for index in (3, 1, 0, 2):
        shuffled.close(*outcomes[index])  # type: ignore[arg-type]
    assert shuffled.state_dict() == ordered.state_dict()


def test_a_failure_counts_in_the_global_rate_but_not_against_the_prompt() -> None:
    prefix = ClosedPrefix(0.98)
    prefix.close(0, "a", "failed")
    assert prefix.rate.rate < 0.5
    assert prefix.rate.history("a") == (0, 0)


def test_a_dropped_group_tells_nothing() -> None:
    prefix = ClosedPrefix(0.98)
    prefix.close(0, "a", "dropped")
    assert prefix.rate.rate == 0.5
    assert prefix.close(1, "b", "qualified") == [1]


def test_groups_that_were_skipped_are_never_passed() -> None:
    prefix = ClosedPrefix(0.98)
    prefix.close(1, "b", "qualified")
    prefix.skip_to(3)
    assert prefix.close(0, "a", "qualified") == []
    assert prefix.close(3, "d", "qualified") == [3]
    assert prefix.rate.history("b") == (0, 0)
