"""The pool of pinned chunks and the order of copies, on a stand-in for streams that records what it is told."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import seqtile
from numerics.test_offload import assert_equal, checkpointed, step
from refusals import refused
from seqtile._compat import checkpoints_in_forward
from seqtile.checkpointing import host_offload
from seqtile.checkpointing.host_offload import ChunkPool, HostMemory, Lane, pool_bytes
from seqtile.checkpointing.policies import installed_checkpointing
from zoo import HIDDEN, causal_lm, tokens

CHUNK = 2**12


class Event:
    def __init__(self, stream: Stream, number: int) -> None:
        self.stream, self.number, self.ended = stream, number, False

    def query(self) -> bool:
        return self.ended


class Stream:
    """Records every call in ``log``; a copy is complete only after something has waited for it."""

    device = torch.device("cpu")

    def __init__(self, name: str, log: list[tuple[Any, ...]]) -> None:
        self.name, self.log = name, log
        self.events: list[Event] = []

    def __enter__(self) -> Stream:
        self.log.append(("enter", self.name))
        return self

    def __exit__(self, *_: object) -> None:
        self.log.append(("leave", self.name))

    def wait_stream(self, other: Stream) -> None:
        self.log.append(("wait for", self.name, other.name))

    def record_event(self) -> Event:
        self.events.append(Event(self, len(self.events)))
        self.log.append(("record", self.name, self.events[-1].number))
        return self.events[-1]

    def wait_event(self, event: Event) -> None:
        for one in event.stream.events[: event.number + 1]:  # a stream runs in order
            one.ended = True
        self.log.append(("wait", self.name, event.number))


class Machine:
    """Lanes of the stand-in, and how many layers each copy found in flight."""

    def __init__(self, most_chunks: int = 2**30) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.chunks: list[int] = []
        self.copies, self.current = Stream("copies", self.log), Stream("current", self.log)
        self.lanes: list[Lane] = []
        self.most_chunks = most_chunks
        self.outward: list[int] = []
        self.inward: list[int] = []

    def allocate(self, size: int) -> Tensor:
        if len(self.chunks) == self.most_chunks:
            raise RuntimeError("CUDA error: out of memory\nmore")
        self.chunks.append(size)
        return torch.zeros(size, dtype=torch.uint8)

    def make_lane(self, memory: HostMemory, device: torch.device) -> Lane:
        lane = Lane(self.copies, lambda: self.current, ChunkPool(memory.budget, self.allocate), memory.in_flight)
        write, read = lane.write, lane.read

        def noting_write(tensor: Tensor, layer: int) -> Any:
            found = write(tensor, layer)
            self.outward.append(len({one for one, _, _ in lane.outward}))
            return found

        def noting_read(*arguments: Any) -> Any:
            found = read(*arguments)
            self.inward.append(len(lane.inward))
            return found

        lane.write, lane.read = noting_write, noting_read  # type: ignore[method-assign]
        self.lanes.append(lane)
        return lane


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    found = Machine()
    monkeypatch.setattr(host_offload, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(host_offload, "available_host_bytes", lambda: 0)

    def lane(self: HostMemory, device: torch.device) -> Lane:
        if device not in self._lanes:
            self._lanes[device] = found.make_lane(self, device)
        return self._lanes[device]

    monkeypatch.setattr(HostMemory, "lane", lane)
    return found


def host(model: nn.Module) -> HostMemory:
    found = installed_checkpointing(model)[0].host
    assert found is not None
    return found


def park(memory: HostMemory, tensor: Tensor) -> host_offload.OffloadedTensor:
    assert memory.has_room(tensor)
    return memory.park(tensor)


def deep(**settings: Any) -> nn.Module:
    model = causal_lm("llama", use_cache=False, attn_implementation="sdpa", num_hidden_layers=6)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if settings:
        seqtile.apply(model, blocks="none", **settings)
    return model


@pytest.mark.parametrize(
    ("settings", "tensors"),
    [
        ({"checkpoint": "layer"}, 1),
        ({"checkpoint": "attention-saved"}, 3),  # input; attention's output and its log-sum-exp
        ({"chunk": 4}, 1),
        ({"chunk": 4, "segment": 2}, 3),  # input; keys and values of the second layer
        ({"chunk": 4, "segment": 3}, 5),
    ],
)
def test_the_same_numbers_and_the_order_of_events(settings: dict[str, Any], tensors: int, machine: Machine) -> None:
    expected = step(deep(**settings))
    model = deep(offload=True, **settings)
    if settings.get("segment", 1) > 1 and not checkpoints_in_forward(model.model.layers[0]):  # type: ignore[operator, index, union-attr]
        pytest.skip("this transformers checkpoints each layer, and a segment keeps its input")
    for _ in range(2):
        machine.log.clear()
        assert_equal(step(model), expected)
        for number, entry in enumerate(machine.log):
            if entry[0] == "enter":  # a copy waits for what computes, and is followed by its event
                assert machine.log[number - 1] == ("wait for", "copies", "current")
                assert machine.log[number + 1 : number + 3][0] == ("leave", "copies")
                assert machine.log[number + 2][:2] == ("record", "copies")
    [lane] = machine.lanes
    assert not lane.outward and not lane.inward, "no device tensor is held after the step"
    assert max(machine.outward) == host_offload.IN_FLIGHT
    assert max(machine.inward) <= host_offload.IN_FLIGHT * tensors
    # The layer before was under way before this one's was waited for.
    reads = [entry for entry in machine.log if entry[0] in ("record", "wait")]
    last = max(number for number, entry in enumerate(reads) if entry[0] == "record")
    assert sum(entry[0] == "wait" for entry in reads[last:]) >= 2


@pytest.mark.parametrize("in_flight", [1, 2, 3])
def test_layers_in_flight_are_bounded(in_flight: int, machine: Machine) -> None:
    memory = HostMemory(in_flight=in_flight)
    alive: list[weakref.ref[Tensor]] = []
    parked = []
    for number in range(7):
        memory.begin_layer()
        for _ in range(2):
            tensor = torch.full((40,), float(number))
            parked.append(park(memory, tensor))
            alive.append(weakref.ref(tensor.untyped_storage()))
            del tensor
        assert sum(ref() is not None for ref in alive) <= 2 * in_flight
    assert max(machine.outward) == in_flight
    for number in reversed(range(7)):
        for one in parked[2 * number : 2 * number + 2]:
            assert torch.equal(one.take(), torch.full((40,), float(number)))
        ahead = {one.layer - 1 for one in parked if one.fetched is not None}
        assert ahead == set(range(max(0, number - in_flight + 1), number))
    assert not machine.lanes[0].inward


def test_what_is_fetched_ahead_and_never_taken_is_released_after_its_copy(machine: Machine) -> None:
    memory = HostMemory()
    parked = []
    for _ in range(2):
        memory.begin_layer()
        parked.append(park(memory, torch.zeros(8)))
    parked[1].take()
    assert parked[0].fetched is not None
    memory_of = weakref.ref(parked[0].fetched[0].untyped_storage())
    parked.clear()
    gc.collect()
    assert memory_of() is None
    assert all(event.ended for event in machine.copies.events), "a copy still writes there"


@pytest.mark.parametrize("policy", ["layer", "attention-saved"])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_nothing_is_held_after_an_exception(where: str, policy: str, machine: Machine) -> None:
    model, expected = deep(offload=True, checkpoint=policy), step(deep())
    layer = model.model.layers[3]
    calls = 0

    def fail(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == (1 if where == "forward" else 2):  # the second is the recompute
            raise RuntimeError("out of memory")

    hook = layer.mlp.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        step(model)
    gc.collect()
    [lane] = machine.lanes
    assert not lane.outward and not lane.inward
    assert lane.pool.free_bytes == lane.pool.capacity > 0 and host(model).parked_bytes == 0
    hook.remove()
    assert_equal(step(model), expected)


def test_strides_and_types_come_back(machine: Machine) -> None:
    memory = HostMemory()
    whole = torch.arange(4 * 6 * 5).reshape(4, 6, 5)
    for tensor in (
        whole.float(), whole.bfloat16().transpose(0, 1), whole[:, 1:3], whole.double()[1], whole > 7,
        torch.zeros(3, 0), torch.tensor(2.5), whole.half().expand(2, 4, 6, 5),
    ):  # fmt: skip
        found = park(memory, tensor).take()
        assert torch.equal(found, tensor) and found.dtype == tensor.dtype
        if host_offload.is_dense(tensor):
            assert found.stride() == tensor.stride()


def test_what_wraps_other_tensors_is_copied_plainly(machine: Machine) -> None:
    class Wrapped(Tensor):
        pass

    memory = HostMemory()
    tensor = torch.arange(3.0).as_subclass(Wrapped)
    assert torch.equal(park(memory, tensor).take(), tensor)
    assert not machine.chunks


def lengths(model: nn.Module, *many: int) -> Iterator[int]:
    for length in many:
        ids = tokens(1, length)
        model(input_ids=ids, labels=ids).loss.backward()
        yield host(model).pool_bytes


def test_the_pool_is_used_again_over_growing_and_shrinking_lengths(machine: Machine) -> None:
    model = deep(offload=True)
    each = 6 * HIDDEN * 4
    for length, held in zip((20, 50, 30, 50, 7), lengths(model, 20, 50, 30, 50, 7), strict=True):
        longest = 20 if length == 20 else 50
        assert held == pool_bytes(longest * each) == -(-longest * each // CHUNK) * CHUNK
    assert set(machine.chunks) == {CHUNK}
    [lane] = machine.lanes
    assert lane.pool.free_bytes == lane.pool.capacity


def test_a_budget_is_held_and_the_rest_stays_on_the_device(machine: Machine) -> None:
    expected = step(checkpointed())
    for budget in (10 * CHUNK + 1000, 5000, 4096, 100, 3):
        model = checkpointed()
        seqtile.apply(model, blocks="none", offload=f"{budget}")
        machine.chunks.clear()
        assert_equal(step(model), expected)
        list(lengths(model, 20, 90, 10))
        assert host(model).pool_bytes == sum(machine.chunks) <= budget
        assert pool_bytes(10**9, budget) > budget - 16 or budget < 16
        assert all(size & (size - 1) == 0 for size in machine.chunks), "PyTorch rounds up to powers of two"


def test_no_chunk_is_pinned_for_a_tensor_that_does_not_fit(machine: Machine) -> None:
    pool = ChunkPool(4 * CHUNK, lambda size: torch.empty(size, dtype=torch.uint8, device="meta"))
    assert pool.make_room(3 * CHUNK) and pool.take(3 * CHUNK)
    assert not pool.make_room(2 * CHUNK) and pool.capacity == 3 * CHUNK


def test_two_devices_share_one_budget_as_lengths_grow(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = HostMemory(8 * CHUNK)
    lanes: dict[int, Lane] = {}
    monkeypatch.setattr(memory, "lane_of", lambda tensor: lanes[id(tensor)])
    first, second = (torch.empty(0), torch.empty(0))
    for device in (first, second):  # as a first short step makes them: one chunk each
        pool = ChunkPool(memory.budget - memory.pool_bytes, machine.allocate)
        lanes[id(device)] = memory._lanes[torch.device("meta", len(lanes))] = Lane(None, lambda: None, pool, 2)
        assert pool.make_room(CHUNK)
    for chunks in (2, 4, 8):
        for device in (first, second):
            device.resize_(chunks * CHUNK // 4)
            memory.has_room(device)
    assert memory.pool_bytes <= memory.budget


@pytest.mark.parametrize("head_dim", [8, 32])
def test_what_is_kept_of_attention_is_counted_as_it_is(machine: Machine, head_dim: int) -> None:
    model = causal_lm("llama", head_dim=head_dim, use_cache=False, attn_implementation="sdpa")
    seqtile.apply(model, blocks="none", offload=True, checkpoint="attention-saved")
    counted: list[int] = []
    memory = host(model)
    memory.check = lambda each, layers, device: counted.append(each)  # type: ignore[method-assign]
    parked: list[int] = []
    park = memory.park
    memory.park = lambda tensor: (parked.append(tensor.nbytes), park(tensor))[1]  # type: ignore[method-assign]
    model(tokens(2, 40)).logits.sum().backward()
    layers = model.config.num_hidden_layers
    assert counted[0] * layers == sum(parked)


def test_a_host_that_pins_no_more_is_said_once(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    machine.most_chunks = 2
    expected = step(checkpointed())
    model = checkpointed()
    seqtile.apply(model, blocks="none", offload=True)
    for _ in range(2):
        assert_equal(step(model), expected)
        list(lengths(model, 90))
        model.zero_grad()
    said = [record.getMessage() for record in caplog.records if record.name == host_offload.logger.name]
    (sentence,) = said
    assert "7.63e-06 GiB of pinned memory" in sentence and "CUDA error: out of memory" in sentence


def test_chunks_are_counted_before_the_first_copy(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = tokens(1, 20)
    whole = pool_bytes(6 * 20 * HIDDEN * 4)
    assert whole > 6 * 20 * HIDDEN * 4
    model = deep(offload=True)
    monkeypatch.setattr(host_offload, "available_host_bytes", lambda: whole - 1)
    with refused("offload.exceeds-host-memory", "6 layer inputs"):
        model(input_ids=ids)
    assert not machine.chunks
    monkeypatch.setattr(host_offload, "available_host_bytes", lambda: whole)
    model(input_ids=ids, labels=ids).loss.backward()
    # What the pool has is not asked for again.
    monkeypatch.setattr(host_offload, "available_host_bytes", lambda: CHUNK)
    longer = whole // (6 * HIDDEN * 4)
    assert list(lengths(model, longer)) == [pool_bytes(6 * longer * HIDDEN * 4)]


def test_five_hundred_steps_grow_nothing(machine: Machine) -> None:
    memory = HostMemory()
    random.seed(0)
    sizes = [random.randrange(1, 3000) for _ in range(20)]
    held: list[tuple[int, int]] = []
    for number in range(500):
        parked = []
        for layer in range(8):
            memory.begin_layer()
            parked.append((layer, park(memory, torch.full((sizes[number % 20],), float(layer)))))
        for layer, one in reversed(parked):
            assert one.take()[0] == layer
        del parked, one
        pool = machine.lanes[0].pool
        assert pool.free_bytes == pool.capacity and len(pool._free) == len(machine.chunks)
        assert not machine.lanes[0].inward and not machine.lanes[0].outward
        if number in (100, 499):
            machine.log.clear()
            machine.copies.events.clear()
            gc.collect()
            held.append((len(machine.chunks), len(gc.get_objects())))
    assert held[0][0] == held[1][0] == pool_bytes(8 * max(sizes) * 4 + 8 * 15) // CHUNK
    assert held[1][1] <= held[0][1] + 600, "the stand-in's own lists"


def test_extents_of_any_order_lose_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_offload, "CHUNK_BYTES", CHUNK)
    pool = ChunkPool(0, lambda size: torch.zeros(size, dtype=torch.uint8))
    generator = random.Random(1)
    taken: list[tuple[list[Any], int]] = []
    for number in range(300):
        if taken and generator.random() < 0.5:
            extents, value = taken.pop(generator.randrange(len(taken)))
            assert all((pool.bytes_of(one) == value).all() for one in extents)
            pool.give(extents)
            continue
        nbytes, value = generator.randrange(1, 3 * CHUNK), number % 251
        assert pool.make_room(nbytes)
        extents = pool.take(nbytes)
        assert nbytes <= sum(size for _, size in extents) < nbytes + 16
        for one in extents:
            pool.bytes_of(one).fill_(value)
        taken.append((extents, value))
    for extents, _ in taken:
        pool.give(extents)
    assert pool.free_bytes == pool.capacity and len(pool._free) == pool.capacity // CHUNK


MUTANTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "copies do not wait": lambda patch: patch.setattr(Stream, "wait_stream", lambda *_: None),
    "nothing is released": lambda patch: patch.setattr(Lane, "release", lambda *_: None),
    "one too many ahead": lambda patch: patch.setattr(HostMemory, "prefetch_before", lambda self, one: [
        other.fetch() for ref in self._order if (other := ref()) is not None and not other.taken and other is not one]),
}  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_order_of_events_is_checked(mutant: str, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[mutant](monkeypatch)
    with pytest.raises((AssertionError, IndexError)):
        test_the_same_numbers_and_the_order_of_events({"checkpoint": "layer"}, 1, machine)
