"""The slab: its sizes, its slots, its generations, and what it leaves behind (nothing)."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from pingpong_bus.errors import BusError, SlabFull, StreamGone
from pingpong_bus.memory_limit import available_memory
from pingpong_bus.messages import StreamRef
from pingpong_bus.slab import MAX_CAPACITY, MAX_GENERATION, LogState, Slab, pack_word, unpack_word


@pytest.fixture
def slab() -> Iterator[Slab]:
    with Slab.create(slots=3, capacity=10) as made:
        yield made


def descriptors() -> list[str]:
    """What this process has open."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            found.append(str(link.readlink()))
        except FileNotFoundError:  # the descriptor of this very listing
            continue
    return sorted(found)


def test_slots_are_given_once_and_come_back(slab: Slab) -> None:
    streams = [slab.allocate() for _ in range(3)]
    assert {stream.slot for stream in streams} == {0, 1, 2}
    assert slab.free_slots == 0
    with pytest.raises(SlabFull, match="All 3 slots"):
        slab.allocate()
    slab.free(streams[1])
    assert slab.free_slots == 1
    again = slab.allocate()
    assert again.slot == streams[1].slot
    assert again.generation != streams[1].generation


def test_a_slot_rests_as_long_as_can_be(slab: Slab) -> None:
    slab.free(slab.allocate())
    assert [slab.allocate().slot for _ in range(3)] == [1, 2, 0]


def test_a_log_is_freed_once(slab: Slab) -> None:
    stream = slab.allocate()
    slab.free(stream)
    with pytest.raises(StreamGone):
        slab.free(stream)
    assert slab.free_slots == 3


def test_a_slot_outside_the_slab_is_gone(slab: Slab) -> None:
    for slot in (3, -1, 2**32):
        with pytest.raises(StreamGone, match="no slot"):
            slab.require(StreamRef(slot=slot, generation=1))


def test_generations_wrap_and_skip_zero(slab: Slab) -> None:
    stream = slab.allocate()
    slab.words[slab.word_index(stream.slot)] = pack_word(MAX_GENERATION, LogState.OPEN, 0)
    slab.free(StreamRef(slot=stream.slot, generation=MAX_GENERATION))
    slab.allocate()
    slab.allocate()
    assert slab.allocate() == StreamRef(slot=stream.slot, generation=1)


def test_the_word_holds_the_largest_values() -> None:
    largest = (MAX_GENERATION, LogState.ABORTED, MAX_CAPACITY)
    word = pack_word(*largest)
    assert word < 2**64
    assert unpack_word(word) == largest


def test_an_attached_slab_sees_the_same_memory_and_gives_nothing_away(slab: Slab) -> None:
    stream = slab.allocate()
    inherited = os.dup(slab.fd)
    os.set_inheritable(inherited, True)
    with Slab.attach(inherited) as other:
        assert not os.get_inheritable(other.fd)
        assert (other.slots, other.capacity) == (3, 10)
        assert other.require(stream) == (LogState.OPEN, 0)
        assert other.writer_pid(stream) == 0
        for attempt in (other.allocate, lambda: other.free(stream), lambda: other.free_slots):
            with pytest.raises(BusError, match="Only the process that made"):
                attempt()


@pytest.mark.parametrize(("slots", "capacity"), [(0, 10), (-1, 10), (1, 0), (1, -5), (1, 2**32)])
def test_senseless_sizes_are_refused(slots: int, capacity: int) -> None:
    with pytest.raises(SlabFull, match="cannot be made"):
        Slab.create(slots, capacity)


def test_more_than_the_machine_has_is_refused_before_it_is_taken() -> None:
    before = available_memory()
    with pytest.raises(SlabFull, match="MiB of shared memory, more than 50% of the") as caught:
        Slab.create(slots=before // 2**20, capacity=2**20)
    assert "fewer slots" in caught.value.hint


def test_what_the_kernel_refuses_is_a_sentence_and_leaves_nothing() -> None:
    before, limits = descriptors(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, limits[1]))
    try:
        with pytest.raises(SlabFull, match="need 1\\.0 MiB of shared memory, more than what the kernel gives"):
            Slab.create(slots=1, capacity=2**18)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert descriptors() == before


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.ENOMEM])
def test_a_machine_that_runs_out_meanwhile_is_a_sentence(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    before = descriptors()
    with pytest.raises(SlabFull, match="what the kernel gives"):
        Slab.create(slots=1, capacity=10)
    assert descriptors() == before


@pytest.mark.parametrize(
    ("word", "value", "sentence"),
    [(0, 1, "not a token slab"), (1, 99, "layout 99"), (2, 4, "does not fit"), (3, 1000, "does not fit")],
)
def test_attach_checks_what_it_is_given(slab: Slab, word: int, value: int, sentence: str) -> None:
    slab.words[word] = value
    before = descriptors()
    with pytest.raises(BusError, match=sentence):
        Slab.attach(os.dup(slab.fd))
    assert descriptors() == before


def test_attach_refuses_an_empty_file_and_a_closed_descriptor() -> None:
    with pytest.raises(BusError, match="not a token slab"):
        Slab.attach(os.memfd_create("empty"))


def test_the_memory_cannot_be_cut_off_under_a_mapping(slab: Slab) -> None:
    for size in (0, 2**20):
        with pytest.raises(PermissionError):
            os.ftruncate(slab.fd, size)


def test_nothing_stays_open() -> None:
    before = descriptors()
    slab = Slab.create(slots=2, capacity=100)
    other = Slab.attach(os.dup(slab.fd))
    assert set(descriptors()) - set(before) == {"/memfd:pingpong-slab (deleted)"}  # no name, so nothing to leave
    for closing in (other, slab, slab):
        closing.close()
    assert descriptors() == before


def test_a_container_limit_counts(tmp_path: Path) -> None:
    group = tmp_path / "outer" / "inner"
    group.mkdir(parents=True)
    membership = tmp_path / "membership"
    membership.write_text("0::/outer/inner\n")
    assert available_memory(tmp_path, membership) > 2**20
    for folder, limit in ((group, "max"), (group.parent, "5000")):
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text("4000\n")
        (folder / "memory.stat").write_text("anon 1000\ninactive_file 500\n")
    assert available_memory(tmp_path, membership) == 1500
    (group.parent / "memory.current").write_text("9000\n")
    assert available_memory(tmp_path, membership) == 0
