from __future__ import annotations

import pytest

from ascend_core.errors import ConfigError
from ascend_suite.size import parse_size, size_text


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("64GiB", 64 * 2**30),
        ("64 GiB", 64 * 2**30),
        ("64G", 64 * 2**30),
        ("64Gi", 64 * 2**30),
        ("64GB", 64 * 10**9),
        ("1.5tib", 3 * 2**39),
        ("512 kb", 512_000),
        ("168M", 168 * 2**20),
        ("4096", 4096),
        ("4096B", 4096),
    ],
)
def test_sizes_are_read_as_people_write_them(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "GiB", "-1G", "64 apples", "1e9", "64GiBi"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is no size"):
        parse_size(text)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1536, "1.50 KiB"),
        (64 * 2**30, "64.0 GiB"),
        (200 * 2**30, "200 GiB"),
        (3 * 2**50, "3072 TiB"),
        (-(2**20), "-1.00 MiB"),
    ],
)
def test_sizes_are_written_with_three_digits(nbytes: int, text: str) -> None:
    assert size_text(nbytes) == text
