"""Kernels: what their parameters are bound to, and the entry points that bind them."""

from __future__ import annotations

from dataclasses import dataclass

from .lexer import Attribute, MetalError, Token, outside_templates, spelled, split

GRID_ATTRIBUTES = (
    "thread_position_in_grid",
    "thread_position_in_threadgroup",
    "thread_index_in_threadgroup",
    "threadgroup_position_in_grid",
    "threads_per_threadgroup",
    "threadgroups_per_grid",
    "threads_per_grid",
    "thread_index_in_simdgroup",
    "simdgroup_index_in_threadgroup",
    "threads_per_simdgroup",
    "simdgroups_per_threadgroup",
    "thread_execution_width",
    "dispatch_threads_per_threadgroup",
    "dispatch_simdgroups_per_threadgroup",
    "thread_index_in_quadgroup",
    "quadgroup_index_in_threadgroup",
    "grid_size",
    "grid_origin",
)  # fmt: skip  the runtime's order


@dataclass
class Parameter:
    kind: str  # buffer, threadgroup or a grid attribute
    index: int
    condition: str  # function constant without which the parameter does not exist


@dataclass
class Kernel:
    name: str
    parameters: list[Parameter]
    place: str
    attributes: list[Attribute]


def parameters_of(inside: list[Token]) -> list[Parameter]:
    """Parses the parameter list of a kernel's declaration."""
    return _number([_parameter(part) for part in split(inside)])


def _parameter(part: list[Token]) -> Parameter:
    kind, index, condition = "", 0, ""
    for token in part:
        for attribute in token.attributes:
            if attribute.name in ("buffer", "threadgroup"):
                if not attribute.arguments.isdigit():
                    raise MetalError(f"{token.place}: {attribute.name} needs a number")
                kind, index = attribute.name, int(attribute.arguments)
            elif attribute.name == "function_constant":
                condition = attribute.arguments
            elif attribute.name in GRID_ATTRIBUTES:
                kind, index = "attribute", GRID_ATTRIBUTES.index(attribute.name)
            else:
                raise MetalError(f"{token.place}: unknown parameter attribute {attribute.name}")
    if not kind:
        outside = {t.text for t in outside_templates([t for t in part if t.is_code])}
        if not outside & {"*", "&", "["}:
            raise MetalError(
                f"{part[0].place}: kernel parameter `{spelled(part)}` has no attribute"
            )
        kind, index = "threadgroup" if "threadgroup" in outside else "buffer", -1
    return Parameter(kind, index, condition)


def _number(parameters: list[Parameter]) -> list[Parameter]:
    """Buffers without an index get the first ones that are free, in order."""
    for kind in ("buffer", "threadgroup"):
        mine = [p for p in parameters if p.kind == kind]
        taken = {p.index for p in mine}
        free = iter([i for i in range(64) if i not in taken])
        for parameter in mine:
            if parameter.index < 0:
                parameter.index = next(free)
    return parameters


def entry_point(function: str, kernel: Kernel) -> str:
    """A function without parameters that calls `function`, an expression, in every thread."""
    bound = []
    for i, p in enumerate(kernel.parameters):
        address = f"__sim_{'buffer' if p.kind == 'buffer' else 'threadgroup_argument'}({p.index})"
        if p.condition:
            address = f"({p.condition} ? {address} : 0)"
        how = f"attribute<_P{i}>::from({p.index})"
        if p.kind != "attribute":
            how = f"address<_P{i}>::from({address})"
        bound.append(f"metal::__bind_{how}")
    types = [
        f"using _P{i} = metal::__parameter_t<decltype({function}), {i}>; "
        for i in range(len(kernel.parameters))
    ]
    # decltype of a function needs this where the function is no template.
    pragma = '_Pragma("OPENCL EXTENSION __cl_clang_function_pointers : {}")'
    return (
        f'{pragma.format("enable")} extern "C" void __sim_entry() {{ {"".join(types)}'
        f"{function}({', '.join(bound)}); }} {pragma.format('disable')}"
    )
