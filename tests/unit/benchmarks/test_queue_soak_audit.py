"""The soak's auditor, on stories one can follow by hand."""

from benchmarks.queue_soak_audit import Event, Kind, Put, read_log, unfinished, violations

TASKS = ("train",)


def story(*told: tuple[Kind, int]) -> list[Event]:
    """What happened to group g, with the lease it happened under."""
    return [Event(float(at), kind, "g", 0, "train", lease) for at, (kind, lease) in enumerate(told)]


PUT = ((Kind.PUT_BEGUN, 0), (Kind.PUT_ENDED, 0))


def acked(lease: int) -> tuple[tuple[Kind, int], ...]:
    return ((Kind.DELIVERED, lease), (Kind.ACK_BEGUN, lease), (Kind.ACK_ENDED, lease))


def test_a_group_put_delivered_and_acked_is_in_order() -> None:
    assert violations(story(*PUT, *acked(1)), TASKS) == []


def test_a_lease_that_ended_without_an_ack_is_followed_by_another() -> None:
    refused = ((Kind.DELIVERED, 1), (Kind.ACK_BEGUN, 1), (Kind.ACK_REFUSED, 1))
    assert violations(story(*PUT, *refused, *acked(2)), TASKS) == []


def test_a_group_that_a_task_never_had_is_lost() -> None:
    assert violations(story(*PUT), TASKS) == [
        "g attempt 0: acknowledged to its producer, lost to train"
    ]
    assert violations(story(*PUT, (Kind.DELIVERED, 1)), TASKS)


def test_an_ack_whose_consumer_was_killed_in_it_may_have_been_done() -> None:
    assert violations(story(*PUT, (Kind.DELIVERED, 1), (Kind.ACK_BEGUN, 1)), TASKS) == []


def test_a_delivery_after_the_ack_is_found_whatever_the_clocks_say() -> None:
    told = story((Kind.DELIVERED, 2), *PUT, *acked(1))
    assert violations(told, TASKS) == ["g attempt 0: acked by train under 1, delivered under [2]"]


def test_two_acks_are_one_too_many() -> None:
    assert any(
        "leases [1, 2]" in line for line in violations(story(*PUT, *acked(1), *acked(2)), TASKS)
    )


def test_a_lost_group_is_in_order_once_it_was_put_again() -> None:
    told = story(*PUT, (Kind.LOST, 0))
    assert violations(told, TASKS) == ["g attempt 0: reported lost, and not put again"]
    again = [Event(9.0, kind, "g", 1, "train", lease) for kind, lease in (*PUT, *acked(7))]
    assert violations(told + again, TASKS) == []


def test_what_was_delivered_was_put_and_has_its_content() -> None:
    assert violations(story((Kind.DELIVERED, 1)), TASKS) == [
        "g attempt 0: delivered, but never put"
    ]
    assert violations(story(*PUT, (Kind.WRONG, 1), *acked(1)), TASKS) == [
        "g attempt 0: delivered to train with another content"
    ]


def test_a_put_without_an_answer_is_unfinished_until_somebody_repeats_it() -> None:
    told = story((Kind.PUT_BEGUN, 0))
    assert unfinished(told) == [Put("g", 0)]
    assert violations(told, TASKS) == ["g attempt 0: put, and never acknowledged"]
    assert unfinished(told + story(*PUT)) == []


def test_a_line_cut_by_a_kill_is_no_event() -> None:
    assert read_log([b'[1.0,"acked', b'[0.5,"lost","g",0]\n']) == [Event(0.5, Kind.LOST, "g", 0)]
