"""The file of a form: found as browsers and curl send it, and at no cost of the sender's choice."""

from __future__ import annotations

import asyncio
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.gateway.edge.form import MOST_PARTS, WINDOW, file_of
from serve.gateway.errors import BadRequestError

TYPE = "multipart/form-data; boundary=edge"
FILE = b'Content-Disposition: form-data; name="any"; filename="a.png"\r\nContent-Type: image/png'
FIELD = b'Content-Disposition: form-data; name="note"'


def form(*parts: tuple[bytes, bytes], boundary: bytes = b"edge") -> bytes:
    said = b"".join(b"--" + boundary + b"\r\n" + head + b"\r\n\r\n" + body + b"\r\n" for head, body in parts)
    return said + b"--" + boundary + b"--\r\n"


def found(body: bytes, content_type: str = TYPE) -> bytes:
    return asyncio.run(file_of(content_type, body))


@given(st.binary(), st.lists(st.binary(), max_size=4), st.binary(), st.integers(0, 4))
def test_the_part_with_a_file_s_name_is_the_file(file: bytes, fields: list[bytes], around: bytes, at: int) -> None:
    parts = [(FIELD, field) for field in fields]
    parts.insert(at, (FILE, file))
    body = form(*parts)
    if any(b"--edge" in each for each in (file, around, *fields)):
        return
    assert found(body) == file
    assert found(around.rstrip(b"\r\n-") + b"\r\n" + body + around) == file


@pytest.mark.parametrize(
    "content_type",
    [
        'multipart/form-data; boundary="edge"', "multipart/form-data; charset=utf-8; BOUNDARY=edge",
        'multipart/form-data; boundary="ed\\ge"', "multipart/form-data;boundary=edge ; x=y",
        "multipart/form-data; charset=no-such-codec; boundary=edge",
    ],
)  # fmt: skip
def test_the_boundary_is_read_as_it_may_be_written(content_type: str) -> None:
    assert found(form((FILE, b"x")), content_type) == b"x"


@pytest.mark.parametrize("name", ["a.png", "größe.png", 'quo\\"te; name=x', ""])
def test_any_name_of_a_file_will_do(name: str) -> None:
    head = f'content-disposition: form-data; name="any"; filename="{name}"'.encode()
    assert found(form((head, b"x"))) == b"x"
    head = f"Content-Disposition: form-data; name=any; filename*=UTF-8''{quote(name)}".encode()
    assert found(form((head, b"x"))) == b"x"


REFUSED = {
    "no boundary": (form((FILE, b"x")), "multipart/form-data", "names no boundary"),
    "a long boundary": (b"", "multipart/form-data; boundary=" + "a" * 71, "names no boundary"),
    "a long header": (form((FILE, b"x")), TYPE + "; charset=" + "x" * 60_000, "names no boundary"),
    "another boundary": (form((FILE, b"x"), boundary=b"other"), TYPE, "not in it"),
    "nothing": (b"", TYPE, "not in it"),
    "no part": (b"--edge--\r\n", TYPE, "no file"),
    "no file": (form((FIELD, b"x"), (b'X: form-data; filename="a"', b"y")), TYPE, "no file"),
    "a name in quotes": (form((b'Content-Disposition: form-data; name="; filename=x"', b"x")), TYPE, "no file"),
    "two boundaries": (form((FILE, b"x")), TYPE + "; boundary=other", "several"),
    "an end that goes on": (form((FILE, b"x"))[:-2] + b"more\r\n", TYPE, "goes on"),
    "two headers that name it": (form((FIELD + b"\r\n" + FILE, b"x")), TYPE, "several headers"),
    "a name of another kind": (form((b'Content-Disposition: form-data; filenamex="a"', b"x")), TYPE, "no file"),
    "two files": (form((FILE, b"x"), (FILE, b"y")), TYPE, "2 files"),
    "cut short": (form((FILE, b"x"))[:-10], TYPE, "in the middle"),
    "no headers": (b"--edge\r\nx\r\n--edge--\r\n", TYPE, "no headers"),
    "long headers": (form((FILE + b"\r\nX: " + b"y" * 10_000, b"x")), TYPE, "too long ones"),
    "a boundary that goes on": (b"--edges\r\n" + FILE + b"\r\n\r\nx\r\n--edge--\r\n", TYPE, "goes on"),
    "many parts": (form(*[(FIELD, b"x")] * (MOST_PARTS + 1)), TYPE, "more than"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_form_with_one_file_is_refused_and_told(case: str) -> None:
    body, content_type, why = REFUSED[case]
    with pytest.raises(BadRequestError) as caught:
        found(body, content_type)
    assert why in caught.value.why


def test_others_have_their_turn_while_a_long_one_is_searched() -> None:
    """Of 16 MB that all but match its boundary, no more than a window is searched at a time."""
    body = b"--edge\r\n" + FILE + b"\r\n\r\n" + b"\r\n--" * 4_000_000

    async def main() -> int:
        turns = 0
        reading = asyncio.ensure_future(file_of("multipart/form-data; boundary=edge", body))
        while not reading.done():
            await asyncio.sleep(0)
            turns += 1
        with pytest.raises(BadRequestError):
            reading.result()
        return turns

    assert asyncio.run(main()) >= len(body) // WINDOW


def test_a_search_ends_with_its_client() -> None:
    async def main() -> None:
        body = b"--a\r\n" + FILE + b"\r\n\r\n" + b"\r\n--" * 16_000_000
        reading = asyncio.ensure_future(file_of("multipart/form-data; boundary=a", body))
        await asyncio.sleep(0)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading

    asyncio.run(main())
