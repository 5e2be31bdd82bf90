"""Files of tensors are those of safetensors, byte for byte, and no tensor is copied as a whole for them."""

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, save

from hetpeer.dht.base.file_pieces import FilePart, InMemory, OpenFile, read
from hetpeer.stages.block.tensor_file import read_tensors, write_tensors
from hetpeer.stages.block.torch_content import TorchContent
from hetpeer.stages.graph.block_spec import SAFETENSORS
from tests.amounts import examples


def written(folder, tensors, metadata=None, dtype=None):
    part = FilePart(OpenFile.nameless(folder), 0, 1 << 20)
    content = {name: TorchContent(tensor, dtype) for name, tensor in tensors.items()}
    write_tensors(part, content, metadata or {})
    return bytes(read(part, 0, part.file.nbytes))


def of_each_dtype():
    """Two tensors of each dtype, in no order, some of them strided or without dimensions."""
    made = {}
    for number, (dtype, shape) in enumerate(
        itertools.product([*sorted(SAFETENSORS), "complex64"], [(2, 3), ()])
    ):
        values = torch.arange(number, number + 6).reshape(2, 3).t().to(getattr(torch, dtype))
        made[f"t{number * 7 % 22}"] = values if shape else values[0, 0].clone()
    return made


def test_all_dtypes(tmp_path):
    tensors = of_each_dtype()
    plain = {name: tensor.contiguous() for name, tensor in tensors.items()}
    assert written(tmp_path, tensors) == save(plain)
    assert written(tmp_path, tensors, {"format": "pt"}) == save(plain, metadata={"format": "pt"})
    assert written(tmp_path, {}) == save({})


def test_another_dtype_is_for_floating_point_numbers_alone(tmp_path):
    tensors = of_each_dtype()
    found = load(written(tmp_path, tensors, dtype=torch.bfloat16))
    for name, tensor in tensors.items():
        expected = tensor.bfloat16() if tensor.is_floating_point() else tensor
        assert torch.equal(found[name], expected)
        assert found[name].dtype == expected.dtype


@examples(100)
@given(
    st.lists(
        st.tuples(st.sampled_from(sorted(SAFETENSORS)), st.lists(st.integers(0, 4), max_size=3)), max_size=6
    )
)
def test_what_safetensors_writes_is_read(kinds):
    tensors = {
        f"{number}": torch.ones(shape, dtype=getattr(torch, dtype))
        for number, (dtype, shape) in enumerate(kinds)
    }
    found, metadata = read_tensors(InMemory(save(tensors, metadata={"a": "b"})), "it")
    assert metadata == {"a": "b"}
    assert found.keys() == tensors.keys()
    for name, stored in found.items():
        raw = read(stored, 0, stored.nbytes)
        assert (SAFETENSORS[str(tensors[name].dtype)[6:]], tuple(tensors[name].shape)) == (
            stored.dtype,
            stored.shape,
        )
        assert raw == tensors[name].reshape(-1).view(torch.uint8).numpy().tobytes()
