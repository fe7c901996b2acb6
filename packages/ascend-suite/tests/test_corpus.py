from __future__ import annotations

import pydoc_data.topics

import pytest
import torch

from ascend_core.errors import ConfigError
from ascend_suite.demo.corpus import Batch, corpus, draw_batches

CPU = torch.device("cpu")


def draw(text: torch.Tensor, *, seed: int = 0, count: int = 3) -> list[Batch]:
    return draw_batches(text, count=count, batch=4, seq=16, seed=seed, device=CPU)


def test_the_corpus_is_the_text_of_pythons_own_help() -> None:
    text = bytes(corpus().tolist()).decode("utf-8")
    assert len(text) > 100_000
    assert all(topic in text for topic in pydoc_data.topics.topics.values())


def test_targets_are_the_bytes_that_follow_the_tokens_in_the_text() -> None:
    text = corpus()
    for batch in draw(text):
        assert batch.tokens.shape == batch.targets.shape == (4, 16)
        assert batch.tokens.dtype == batch.targets.dtype == torch.int64
        for tokens, targets in zip(batch.tokens, batch.targets, strict=True):
            stretch = bytes([*tokens.tolist(), int(targets[-1])])
            assert stretch in bytes(text.tolist())
            assert torch.equal(tokens[1:], targets[:-1])


def test_the_seed_decides_the_batches() -> None:
    text = corpus()
    first, again, other = draw(text), draw(text), draw(text, seed=1)
    assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0].tokens, other[0].tokens)


def test_the_ambient_random_state_does_not_move() -> None:
    before = torch.get_rng_state()
    draw(corpus())
    assert torch.equal(torch.get_rng_state(), before)


def test_every_start_that_leaves_room_for_the_target_is_drawn() -> None:
    batches = draw(torch.arange(18, dtype=torch.uint8), count=20)
    assert {int(start) for batch in batches for start in batch.tokens[:, 0]} == {0, 1}
    assert max(int(batch.targets.max()) for batch in batches) == 17


def test_a_sequence_as_long_as_the_text_is_refused() -> None:
    with pytest.raises(ConfigError, match="too short for sequences of 16") as caught:
        draw(torch.zeros(16, dtype=torch.uint8))
    assert "below 16" in str(caught.value)
