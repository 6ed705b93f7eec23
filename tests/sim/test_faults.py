"""Every kind of fault that the simulator knows is found, with the lines that made it."""

# ruff: noqa: E501  (a small kernel and what is said of it a line)

from __future__ import annotations

import numpy as np
import pytest

from . import Buffer, SimCompileError, SimFault, SimLaunchError, SimLibrary, missing

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"
SIGNATURE = """kernel void k(device float* data [[buffer(0)]], constant int& n [[buffer(1)]],
  threadgroup float* shared [[threadgroup(0)]],
  uint tid [[thread_position_in_threadgroup]], uint group [[threadgroup_position_in_grid]],
  uint lane [[thread_index_in_simdgroup]]) {
"""  # the body begins at line 7


def launch(body: str, threads: int = 64, grid: int = 1, seed: int = 0, n: int = 64, **options):
    """Runs `body`, whose first line is line 7, over 256 floats 0, 1, 2, ..."""
    library = SimLibrary(source=f"{HEAD}{SIGNATURE}{body}\n}}\n")
    data = np.arange(256, dtype=np.float32)
    access = options.pop("access", "readwrite")
    report = library.launch(
        "k", {0: Buffer(data, access, "data")}, grid, threads, {1: n},
        threadgroup_memory={0: 4096}, seed=seed, **options,
    )  # fmt: skip
    return data, report


def faults(body: str, **options) -> str:
    with pytest.raises(SimFault) as caught:
        launch(body, **options)
    return str(caught.value)


def refused(source: str) -> str:
    with pytest.raises(SimCompileError) as caught:
        SimLibrary(source=HEAD + source).compile()
    return str(caught.value)


# --- Races ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_a_race_in_threadgroup_memory_names_both_lines(seed) -> None:
    text = faults("shared[tid] = data[tid];\ndata[tid] = shared[tid ^ 63];", seed=seed)
    assert "race" in text and "source.metal:7:" in text and "source.metal:8:" in text
    assert "threadgroup(0)" in text and "no barrier" in text


def test_a_barrier_ends_the_race() -> None:
    data, report = launch(
        "shared[tid] = data[tid];\nthreadgroup_barrier(mem_flags::mem_threadgroup);\n"
        "data[tid] = shared[tid ^ 63];"
    )
    assert np.array_equal(data[:64], np.arange(63, -1, -1))
    assert report.barriers == 1


@pytest.mark.parametrize("flags", ["mem_flags::mem_none", "mem_flags::mem_device"])
def test_a_barrier_with_the_wrong_flags_does_not(flags) -> None:
    body = f"shared[tid] = data[tid];\nthreadgroup_barrier({flags});\ndata[tid] = shared[tid ^ 63];"
    assert "race" in faults(body)


def test_a_simdgroup_barrier_orders_its_simd_group_only() -> None:
    body = (
        "shared[tid] = data[tid];\nsimdgroup_barrier(mem_flags::mem_threadgroup);\n"
        "data[tid] = shared[tid ^ {}];"
    )
    data, report = launch(body.format(31))
    assert np.array_equal(data[:32], np.arange(31, -1, -1))
    assert report.simdgroup_barriers == 2
    assert "race" in faults(body.format(63))


def test_a_simd_operation_orders_no_memory() -> None:
    body = "shared[tid] = data[tid];\nfloat s = simd_sum(1.0f);\ndata[tid] = shared[tid ^ 1] + s;"
    assert "race" in faults(body)


def test_two_writes_race() -> None:
    assert "written by" in faults("shared[tid / 2] = 1;")


def test_a_write_after_a_read_races() -> None:
    body = "float x = data[tid];\nshared[tid] = x;\ndata[tid ^ 1] = x;"
    text = faults(body)
    assert "is read by" in text or "is written by" in text
    assert "source.metal:7:" in text and "source.metal:9:" in text


def test_a_race_in_device_memory_and_its_barrier() -> None:
    body = "data[tid] = 1;\n{}\nfloat x = data[tid ^ 1];\nshared[tid] = x;"
    assert "'data'" in faults(body.format(""))
    assert "race" in faults(body.format("threadgroup_barrier(mem_flags::mem_threadgroup);"))
    launch(body.format("threadgroup_barrier(mem_flags::mem_device);"))


def test_threadgroups_race_in_device_memory_whatever_the_barriers() -> None:
    body = "threadgroup_barrier(mem_flags::mem_device);\nif (tid == 0) data[{}] = group;"
    assert "race" in faults(body.format("0"), grid=4)
    launch(body.format("group"), grid=4)


def test_threadgroups_race_by_reading_what_another_writes() -> None:
    body = "if (tid == 0) data[group] = 1;\nif (tid == 1) shared[0] = data[group ^ 1];"
    assert "race" in faults(body, grid=2)


# --- Divergence -----------------------------------------------------------------------------------


def test_divergence_around_a_simd_operation() -> None:
    text = faults("float x = 0;\nif (lane < 7) x = simd_sum(1.0f);\ndata[tid] = x;")
    assert "divergence" in text and "source.metal:8:" in text and "simd_sum" in text


def test_lanes_that_return_before_a_simd_operation() -> None:
    text = faults("if (lane == 3) return;\ndata[tid] = simd_max(data[tid]);")
    assert "have returned" in text


def test_two_simd_operations_in_two_branches() -> None:
    body = "float x;\nif (lane < 7) x = simd_sum(1.0f);\nelse x = simd_sum(2.0f);\ndata[tid] = x;"
    assert "divergence" in faults(body)


def test_a_branch_of_whole_simd_groups_does_not_diverge() -> None:
    data, _ = launch("float x = 0;\nif (tid < 32) x = simd_sum(1.0f);\ndata[tid] = x;")
    assert np.array_equal(data[:64], np.repeat([32, 0], 32))


def test_divergence_around_a_threadgroup_barrier() -> None:
    text = faults("if (tid < 32) threadgroup_barrier(mem_flags::mem_none);\ndata[tid] = 0;")
    assert "divergence" in text and "source.metal:7:" in text and "threadgroup_barrier" in text


def test_divergence_around_a_simdgroup_barrier() -> None:
    assert "divergence" in faults("if (lane < 3) simdgroup_barrier(mem_flags::mem_none);")


def test_a_lane_that_does_not_exist() -> None:
    assert "lane 40" in faults("data[tid] = simd_shuffle(1.0f, 40);")
    assert "lane 9" in faults("data[tid] = simd_broadcast(1.0f, 9);", threads=8)


# --- Memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", ["256", "-1", "100000000", "-100000000"])
def test_out_of_bounds_of_a_buffer(index) -> None:
    text = faults(f"shared[tid] = data[{index}];")
    assert "out of bounds" in text and "'data'" in text and "source.metal:7:" in text


def test_out_of_bounds_of_a_constant() -> None:
    assert "index 1" in faults("constant int* p = &n;\ndata[tid] = p[1];")


@pytest.mark.parametrize("index", ["1024", "-1", "5000"])
def test_out_of_bounds_of_threadgroup_memory(index) -> None:
    assert "out of bounds" in faults(f"shared[{index}] = 1;")


def test_an_overflow_into_the_next_threadgroup_variable() -> None:
    body = "threadgroup float a[4];\nthreadgroup float b[4];\nthreadgroup float* p = a;\n"
    body += "b[tid & 3] = 0; p[5] = 1;"
    text = faults(body, threads=1)
    assert "out of bounds" in text and "source.metal:7:" in text


def test_out_of_bounds_of_a_local_array() -> None:
    text = faults("float x[4];\nfor (int i = 0; i < n; i++) x[i] = i;\ndata[tid] = x[1];")
    assert "array bounds" in text and "source.metal:8:" in text


def test_a_write_to_a_buffer_that_is_only_read() -> None:
    assert "read-only" in faults("data[tid] = 1;", access="read")


def test_a_misaligned_vector() -> None:
    text = faults(
        "device float4* v = (device float4*)(data + 1);\nv[tid / 4] = v[tid / 4];", threads=1
    )
    assert "misaligned" in text and "multiple of 16" in text and "source.metal:8:" in text
    launch("device packed_float4* v = (device packed_float4*)(data + 1);\nv[0] = v[1];", threads=1)


def test_threadgroup_memory_is_not_what_was_there_before() -> None:
    assert "uninitialised" in faults("data[tid] = shared[tid];")
    # Apple's compiler takes this initial value, and nothing says that it stores it.
    assert "uninitialised" in faults("threadgroup float mine[64] = {0}; data[tid] = mine[tid];")
    # ... and not what the last threadgroup left.
    body = "if (group == 0) shared[tid] = 1;\ndata[64 * group + tid] = shared[tid];"
    assert "uninitialised" in faults(body, grid=2)


def test_poison_is_nan() -> None:
    data, report = launch("data[tid] = shared[tid];", check=False)
    assert np.isnan(data[:64]).all() and report.faults


def test_outputs_are_poisoned() -> None:
    data, _ = launch("if (tid < 3) data[tid] = 1;", access="write")
    assert (data[:3] == 1).all() and np.isnan(data[3:]).all()
    assert "uninitialised" in faults("data[tid] += 1;", access="write")


def test_locals_are_poisoned() -> None:
    data, _ = launch("float x;\nif (tid == 1) x = 2;\ndata[tid] = x;")
    assert data[1] == 2 and np.isnan(data[0])


def test_division_by_zero() -> None:
    assert "division" in faults("data[tid] = n / int(tid);")


def test_too_much_threadgroup_memory() -> None:
    assert "32768" in faults("threadgroup float x[8192];\nx[tid] = 1;")


# --- Launches -------------------------------------------------------------------------------------


def test_launches_that_no_gpu_takes() -> None:
    with pytest.raises(SimLaunchError, match="1 to 1024 threads"):
        launch("", threads=2048)
    with pytest.raises(SimLaunchError, match="no kernel"):
        SimLibrary(source=f"{HEAD}{SIGNATURE}}}").launch("other", {}, 1, 1)


# --- What Metal does not compile ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("statement", "says"),
    [
        ("threadgroup float* p = data;", "initialize"),
        ("device float* p = shared;", "initialize"),
        ("constant float* p = data;", "initialize"),
        ("thread float* p = shared;", "initialize"),
        ("float x = 0; device float* p = &x;", "initialize"),
        ("float* p = data;", "must name an address space"),
        ("float x = 0; float& r = x;", "must name an address space"),
        ("data[0] = std::max(1.0f, 2.0f);", "undeclared identifier 'std'"),
        ("data[0] = expf(1.0f);", "expf"),
        ("data[0] = get_global_id(0);", "get_global_id"),
        ("double x = 1;", "double is not a Metal type"),
        ("n = 3;", "const"),
        ("printf(\"\");", "printf"),
        ("data[0] = __sim_lane();", "not a Metal name"),
        ("global float* p;", "must name an address space"),
        ("half4 h = float4(1);", "no viable conversion"),
        ("data[0] = float4(1).xyq;", "xyq"),
        ("threadgroup float x = 1;", "initial value"),
        ("threadgroup float x[2] = {1, 2};", "initial value"),
        ("bfloat b = n ? bfloat(1.5f) : 2.5f;", "no viable conversion"),
        ("bfloat b = 1.5f;", "no viable conversion"),
        ("bfloat b = bfloat(1.5f); b = max(b, b);", "no viable"),
    ],
)  # fmt: skip
def test_refused(statement, says) -> None:
    text = refused(f"{SIGNATURE}\n{statement}\n}}")
    assert says in text
    assert "source.metal:8:" in text


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("#include <cmath>\n", "cmath"),
        ("#include <vector>\n", "vector"),
        ("void f(float* p) {}", "must name an address space"),
        ("struct S { int n; };\ninline int f(const S& s) { return s.n; }\nkernel void k(device int* d [[buffer(0)]]) { S s = {1}; d[0] = f(s); }", "without an address space"),
        ("struct S { int n; };\nint f(S* s) { return s->n; }\nkernel void k(device int* d [[buffer(0)]]) { S s = {1}; d[0] = f(&s); }", "without an address space"),
        ("struct S { int n; int get() { return n; } };\nkernel void k(constant S& s [[buffer(0)]], device int* d [[buffer(1)]]) { d[0] = s.get(); }", "get"),
        ("kernel void k(float p) {}", "has no attribute"),
        ("kernel void k(uint i [[thread_in_the_grid]]) {}", "unknown parameter attribute"),
        ("template <int N> [[kernel]] void k(device float* p [[buffer(0)]]) {}\ntemplate [[kernel]] decltype(k<1>) k<1>;", "host_name"),
        ("template [[host_name(\"x\")]] [[kernel]] decltype(k<1>) k<1>;", "not a kernel"),
    ],
)  # fmt: skip
def test_refused_declarations(source, says) -> None:
    assert says in refused(source)
