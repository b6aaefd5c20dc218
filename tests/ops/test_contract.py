"""Every backend implements the op list with its signatures, and agrees with the reference on every case."""

from __future__ import annotations

import inspect

import pytest
from tests.ops.cases import GENERATORS, cases_of, check_case, on_backends, op_names

from deltafold.errors import OptionError
from deltafold.ops import Ops, reference, select


def test_every_op_has_cases():
    assert set(GENERATORS) == set(op_names())
    assert len(op_names()) == 25
    for op in op_names():
        assert len(cases_of(op)) >= 4, op


def parameters_of(function: object) -> list[tuple[str, object, object, str]]:
    signature = inspect.signature(function)
    rows = [(p.name, p.kind, p.default, str(p.annotation)) for p in signature.parameters.values() if p.name != "self"]
    return [*rows, ("return", None, None, str(signature.return_annotation))]


@on_backends
def test_signatures_equal_the_protocol(backend, device):
    for module in (select(backend), reference):
        for op in op_names():
            assert parameters_of(getattr(module, op)) == parameters_of(getattr(Ops, op)), (module, op)


@on_backends
def test_unknown_keywords_raise(backend, device):
    for op in op_names():
        case = cases_of(op)[0]
        with pytest.raises(TypeError, match="use_qk_l2norm"):
            getattr(select(backend), op)(*case.args, use_qk_l2norm=True)


def test_unknown_backend_is_refused_by_name():
    with pytest.raises(OptionError, match="'cudnn'"):
        select("cudnn")


@on_backends
@pytest.mark.parametrize("op", op_names())
def test_agrees_with_reference(op, backend, device):
    for case in cases_of(op):
        check_case(case, backend, device)
