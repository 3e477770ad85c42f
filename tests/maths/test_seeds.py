from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from calfat_plugin.seeds import derive_seed, generator

FEW = settings(max_examples=100, deadline=None, derandomize=True)
KEY = st.tuples(
    st.integers(-(10**9), 10**9), st.text(max_size=8), st.integers(0, 999), st.integers(0, 999), st.integers(0, 999)
)


def derived(key):
    seed, purpose, round_, client, extra = key
    return derive_seed(seed, purpose, round=round_, client=client, extra=extra)


@FEW
@given(KEY, KEY)
def test_different_streams_have_different_seeds(one, other):
    assert (derived(one) == derived(other)) == (one == other)


def test_generator_depends_on_its_key_only():
    torch.manual_seed(1)
    first = torch.rand(3, generator=generator(7, "attack", round=2, client=1))
    state = torch.get_rng_state()
    torch.rand(5)
    again = torch.rand(3, generator=generator(7, "attack", round=2, client=1))
    other = torch.rand(3, generator=generator(7, "attack", round=2, client=1, extra=1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    torch.set_rng_state(state)
    generator(7, "attack")
    assert torch.equal(torch.get_rng_state(), state)  # the global stream is left alone
