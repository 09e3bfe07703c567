from __future__ import annotations

import contextlib
import json
import pickle
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from rlhf_scan import CreditRequest, CreditResult, InputError, LocalEngine, rollout

REQUEST = CreditRequest(
    "gae",
    {
        "rewards": torch.arange(5.0),
        "values": torch.linspace(-1, 1, 5),
        "mask": torch.tensor([1, 1, 0, 1, 1]),
        "cu_seqlens": torch.tensor([0, 2, 5]),
    },
    {"gamma": 0.1 + 0.2, "lam": 1, "lam_value": None, "masked": "zero", "dtype": torch.float64},
)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one.contiguous().reshape(-1).view(torch.uint8), other.contiguous().reshape(-1).view(torch.uint8))


def raw(header: object, body: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def test_request_round_trip() -> None:
    back = rollout.request_from_bytes(rollout.request_to_bytes(REQUEST))
    assert back.op == "gae"
    assert back.params == {"gamma": 0.1 + 0.2, "lam": 1.0, "lam_value": None, "masked": "zero", "dtype": "float64"}
    assert set(back.tensors) == set(REQUEST.tensors)
    assert all(same_bits(back.tensors[name], tensor) for name, tensor in REQUEST.tensors.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.bool, torch.int64, torch.uint8])
def test_every_dtype_round_trips(dtype: torch.dtype) -> None:
    tensor = torch.tensor([[0, 1, 3], [2, 0, 1]]).to(dtype)
    back = rollout.request_from_bytes(rollout.request_to_bytes(CreditRequest("gae", {"rewards": tensor})))
    assert same_bits(back.tensors["rewards"], tensor)


def test_nan_and_infinity_round_trip_bit_for_bit() -> None:
    tensor = torch.tensor([0x7FC00001, 0x7F800000, -0x80000000], dtype=torch.int64).to(torch.int32).view(torch.float32)
    back = rollout.request_from_bytes(rollout.request_to_bytes(CreditRequest("gae", {"rewards": tensor})))
    assert same_bits(back.tensors["rewards"], tensor)


def test_views_of_one_storage_and_empty_tensors_round_trip() -> None:
    storage = torch.arange(24.0).reshape(4, 6)
    tensors = {"rewards": storage.t(), "values": storage.t(), "bootstrap": storage[0, :2].expand(3, 2)[0], "mask": storage[:0]}
    back = rollout.request_from_bytes(rollout.request_to_bytes(CreditRequest("gae", tensors)))
    assert all(same_bits(back.tensors[name], tensor) for name, tensor in tensors.items())


def test_result_round_trip() -> None:
    result = LocalEngine("reference").run(REQUEST)
    back = rollout.result_from_bytes(rollout.result_to_bytes(result))
    assert back.report == result.report
    assert all(same_bits(back.tensors[name], tensor) for name, tensor in result.tensors.items())


def test_plain_safetensors_files_are_rollout_files(tmp_path: Path) -> None:
    save_file({"rewards": torch.ones(3)}, tmp_path / "in", metadata={"op": "discounted_returns", "gamma": "0.5"})
    rollout.write_result(LocalEngine("reference").run(rollout.read_request(tmp_path / "in")), tmp_path / "out")
    assert load_file(tmp_path / "out")["returns"].tolist() == [1.75, 1.5, 1.0]


def test_op_and_params_beside_the_file_win() -> None:
    data = rollout.request_to_bytes(CreditRequest("gae", {"rewards": torch.ones(2)}, {"gamma": 0.5}))
    request = rollout.request_from_bytes(data, op="discounted_returns", params={"gamma": "0.25"})
    assert (request.op, request.params) == ("discounted_returns", {"gamma": 0.25})


def test_what_another_op_does_not_take_is_left_out_and_a_mistake_is_not(caplog: pytest.LogCaptureFixture) -> None:
    tensors = {"rewards": torch.ones(2), "values": torch.ones(2), "lam": torch.ones(2)}
    data = rollout.request_to_bytes(CreditRequest("gae", tensors, {"gamma": 0.5, "lam_value": 0.5}))
    request = rollout.request_from_bytes(data, op="discounted_returns")
    assert (set(request.tensors), request.params) == ({"rewards"}, {"gamma": 0.5})
    (message,) = caplog.messages
    assert message.startswith("rollout: discounted_returns takes no ")
    assert all(name in message for name in ("values", "lam", "lam_value", "for gae: left out"))
    assert set(rollout.request_from_bytes(data, op="gae").tensors) == set(tensors)
    mistaken = rollout.request_to_bytes(CreditRequest("gae", tensors, {"gama": 0.5}))
    with pytest.raises(InputError, match=r"discounted_returns: parameter names must be among .*, got 'gama'"):
        rollout.request_from_bytes(mistaken, op="discounted_returns")
    with pytest.raises(InputError, match=r"CreditRequest: op must be one of .*, got 'gea'"):
        rollout.request_from_bytes(data, op="gea")


def test_a_tensor_among_the_params_becomes_one_among_the_tensors() -> None:
    request = rollout.request_from_bytes(
        rollout.request_to_bytes(CreditRequest("gae", {"rewards": torch.ones(2)}, {"gamma": torch.zeros(1)}))
    )
    assert set(request.tensors) == {"rewards", "gamma"}


GOOD = rollout.request_to_bytes(REQUEST)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "no bytes"),
        (pickle.dumps({"rewards": [1.0]}), "nothing is unpickled"),
        (b"PK\x03\x04" + bytes(50), "nothing is unpickled"),
        (b'{"tensors": {}}', "got JSON"),
        (GOOD[:-1], "torn"),
        (GOOD[:20], "torn"),
        (GOOD[:4], "torn"),
        (GOOD + b"\0", "torn"),
        (b"\xff" * 64, "torn"),
        (raw(b"[" * 5000), "torn"),
        (raw({"rewards": {"dtype": "F32", "shape": [2**62, 8], "data_offsets": [0, 0]}}), "torn"),
        (
            raw({"rewards": {"dtype": "F32", "shape": [2**40, 0], "data_offsets": [0, 0]}}),
            "rewards must have a shape that its bytes can hold",
        ),
        (raw({"rewards": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}, b"0"), "dtype 'F4'"),
        (raw({"rewards": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, b"0000"), 'must hold "op"'),
    ],
)
def test_what_is_no_rollout_file_is_an_input_error(data: bytes, words: str) -> None:
    with pytest.raises(InputError, match="rollout: ") as caught:
        rollout.request_from_bytes(data)
    assert words in str(caught.value)


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_damaged_bytes_are_an_input_error_or_a_request(data: st.DataObject) -> None:
    damaged = bytearray(GOOD)
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(InputError):  # any other error fails
        LocalEngine("reference", validate="full").run(rollout.request_from_bytes(bytes(damaged)))


@pytest.mark.parametrize(
    ("tensors", "params", "words"),
    [
        ({"rewards": [1.0]}, {}, "rewards must be a torch.Tensor"),
        ({"rewards": torch.ones(2)}, {"gamma": [0.5]}, "gamma must be a number, a string or a tensor, got list"),
        ({"rewards": torch.ones(2)}, {"gamma": True}, "gamma must be a number, a string or a tensor, got bool"),
        ({"rewards": torch.ones(2).to_sparse()}, {}, "rewards must be dense"),
    ],
)
def test_what_cannot_be_written_is_an_input_error(tensors: dict[str, torch.Tensor], params: dict[str, object], words: str) -> None:
    with pytest.raises(InputError, match=words):
        rollout.request_to_bytes(CreditRequest("gae", tensors, params))


def test_a_request_is_no_result_and_the_other_way_round() -> None:
    with pytest.raises(InputError, match="report"):
        rollout.result_from_bytes(GOOD)
    with pytest.raises(InputError, match='must hold "op"'):
        rollout.request_from_bytes(rollout.result_to_bytes(CreditResult({"returns": torch.ones(1)}, {})))


def test_files_are_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "rollout.safetensors"
    rollout.write_request(REQUEST, path)
    before = path.read_bytes()
    with pytest.raises(InputError, match="gamma"):
        rollout.write_request(CreditRequest("gae", {}, {"gamma": []}), path)
    assert path.read_bytes() == before
    for bad in (tmp_path, tmp_path / "nowhere" / "file", Path("/dev/null")):
        with pytest.raises(InputError, match=str(bad)):
            rollout.write_request(REQUEST, bad)
    assert [entry.name for entry in tmp_path.iterdir()] == ["rollout.safetensors"]
    assert path.stat().st_mode & 0o044 == Path(__file__).stat().st_mode & 0o044


def test_a_file_that_cannot_be_read_is_an_input_error(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(InputError, match="must be a readable file"):
            rollout.read_request(path)
