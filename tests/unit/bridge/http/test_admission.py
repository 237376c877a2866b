"""bridge.http.admission: which connection goes where there are too many."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bridge.http.admission import Guest, Standing, counted_place, one_to_go

GUESTS = st.lists(
    st.builds(
        Guest,
        place=st.sampled_from(["a", "b", "c", None]),
        since_s=st.floats(0, 100),
        standing=st.sampled_from(Standing),
    ),
    min_size=1,
    max_size=12,
)


@given(GUESTS, st.integers(1, 12), st.integers(1, 6))
def test_strangers_go_first_and_an_address_displaces_its_own(found: list[Guest], most: int, of_place: int) -> None:
    """One goes exactly where there are too many: the oldest of those that go first, of the newcomer's address where
    that has too many. A busy one stays."""
    guests = dict(enumerate(found))
    newcomer = len(found) - 1
    found[newcomer].place = found[newcomer].place or "a"  # nobody has shown credentials who has only come
    mine = [key for key, guest in guests.items() if guest.place == guests[newcomer].place]
    gone = one_to_go(guests, newcomer, guests_max=most, place_max=of_place)
    if gone is None:
        assert len(found) <= most and len(mine) <= of_place
        return
    crowd = mine if len(mine) > of_place else list(guests)
    assert len(crowd) > (of_place if len(mine) > of_place else most) and gone in crowd
    others = [guests[key] for key in crowd if key != newcomer and guests[key].standing is not Standing.BUSY]
    if gone == newcomer:
        assert not others
    else:
        assert (guests[gone].standing, guests[gone].since_s) == min((each.standing, each.since_s) for each in others)


def test_an_ipv6_network_is_one_place() -> None:
    """A machine has all of its addresses; an IPv4 address is the same on a socket that takes both."""
    assert counted_place("2001:db8::1") == counted_place("2001:db8::ffff:2") != counted_place("2001:db8:0:1::1")
    assert counted_place("::ffff:192.0.2.7") == counted_place("192.0.2.7") == "192.0.2.7" != counted_place("192.0.2.8")
    assert counted_place("fe80::1%eth0") == counted_place("fe80::2%eth0")
    assert counted_place("not an address") == "not an address"
