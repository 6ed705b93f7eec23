// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include "recorder.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>

#include "mlx/backend/metal/device.h"

namespace recorder {

std::vector<Call> calls;

namespace {

Call current;
std::map<std::string, std::string> libraries;  // name -> source

struct Pipeline {
  std::string kernel;
  std::string function_constants;
  std::string library;
};
std::map<std::string, Pipeline> pipelines;  // by the name that tells them apart
bool concurrent_before = false;

// True if the encoder is in a concurrent context, which it keeps to itself.
bool concurrent(mlx::core::metal::CommandEncoder& encoder);
template <bool mlx::core::metal::CommandEncoder::* Member>
struct Reveal {
  friend bool concurrent(mlx::core::metal::CommandEncoder& encoder) { return encoder.*Member; }
};

// Objects that Metal would make; only their addresses count.
template <typename T>
T* object() {
  alignas(T) static char storage[sizeof(T)];
  return reinterpret_cast<T*>(storage);
}

void bind(const mlx::core::array& a, int index, int64_t offset, bool written) {
  if (index != int(current.buffers.size())) {
    std::fprintf(stderr, "buffer %d bound out of turn\n", index);
    std::abort();
  }
  current.buffers.push_back({a.nbytes(), uint64_t(offset), written});
}

template struct Reveal<&mlx::core::metal::CommandEncoder::concurrent_>;

}  // namespace

// Receives all messages that metal-cpp sends to Objective-C objects.
extern "C" uintptr_t recorder_message(
    void* object, const char* selector, uintptr_t a, uintptr_t b, uintptr_t c) {
  std::string name = selector;
  if (name == "setComputePipelineState:") {
    auto* pipeline = reinterpret_cast<Pipeline*>(a);
    current.kernel = pipeline->kernel;
    current.function_constants = pipeline->function_constants;
    current.source = libraries.at(pipeline->library);
  } else if (name == "maxTotalThreadsPerThreadgroup") {
    return 1024;
  } else if (name == "setBytes:length:atIndex:") {
    auto* bytes = reinterpret_cast<const std::byte*>(a);
    current.constants.assign(bytes, bytes + b);
    current.constants_index = c;
  } else if (name == "setThreadgroupMemoryLength:atIndex:") {
    current.threadgroup_memory = a;
  } else {
    std::fprintf(stderr, "unexpected message %s to %p\n", selector, object);
    std::abort();
  }
  return 0;
}

}  // namespace recorder

// metal-cpp calls this through pointers of the types that it needs.
asm(".globl objc_msgSend\nobjc_msgSend: jmp recorder_message\n");

// The runtime of blocks. metal-cpp refers to it for completion handlers; none is created here.
extern "C" void* _NSConcreteStackBlock[32] = {};
extern "C" void* _NSConcreteGlobalBlock[32] = {};
extern "C" void _Block_object_assign(void*, const void*, int) {}
extern "C" void _Block_object_dispose(const void*, int) {}

// The messages that the binder sends, by name.
namespace MTL::Private::Selector {
SEL selector(const char* name) {
  return reinterpret_cast<SEL>(const_cast<char*>(name));
}
SEL s_ksetComputePipelineState_ = selector("setComputePipelineState:");
SEL s_kmaxTotalThreadsPerThreadgroup = selector("maxTotalThreadsPerThreadgroup");
SEL s_ksetBytes_length_atIndex_ = selector("setBytes:length:atIndex:");
SEL s_kaddCompletedHandler_ = selector("addCompletedHandler:");
SEL s_ksetThreadgroupMemoryLength_atIndex_ = selector("setThreadgroupMemoryLength:atIndex:");
}  // namespace MTL::Private::Selector

namespace mlx::core::metal {

Device& device(mlx::core::Device) {
  return *recorder::object<Device>();
}

CommandEncoder& get_command_encoder(Stream) {
  return *recorder::object<CommandEncoder>();
}

MTL::Library* Device::get_library(
    const std::string& name, const CompileOptions&,
    const std::function<std::string(void)>& builder) {
  auto [found, added] = recorder::libraries.try_emplace(name);
  if (added) {
    found->second = builder();
  }
  return reinterpret_cast<MTL::Library*>(const_cast<std::string*>(&found->first));
}

MTL::ComputePipelineState* Device::get_kernel(
    const std::string& base_name, MTL::Library* library, const std::string& name,
    const MTLFCList& constants, const std::vector<MTL::Function*>&) {
  std::string values;
  for (auto [value, type, index] : constants) {
    if (type != MTL::DataTypeBool || index != values.size()) {
      std::fprintf(stderr, "function constant %zu is not the next bool\n", size_t(index));
      std::abort();
    }
    values += *static_cast<const uint8_t*>(value) ? '1' : '0';
  }
  auto [found, added] = recorder::pipelines.try_emplace(
      name.empty() ? base_name : name,
      recorder::Pipeline{base_name, values, *reinterpret_cast<std::string*>(library)});
  if (!added && found->second.function_constants != values) {
    std::fprintf(stderr, "two pipelines are called %s\n", found->first.c_str());
    std::abort();
  }
  return reinterpret_cast<MTL::ComputePipelineState*>(&found->second);
}

MTL::ComputeCommandEncoder* CommandEncoder::get_command_encoder() {
  return recorder::object<MTL::ComputeCommandEncoder>();
}

void CommandEncoder::set_input_array(const array& a, int index, int64_t offset) {
  recorder::bind(a, index, offset, false);
}

void CommandEncoder::set_output_array(array& a, int index, int64_t offset) {
  recorder::bind(a, index, offset, true);
}

void CommandEncoder::add_temporary(array) {}

void CommandEncoder::dispatch_threadgroups(MTL::Size grid, MTL::Size threads) {
  bool concurrent = recorder::concurrent(*this);
  recorder::current.beside_previous = concurrent && recorder::concurrent_before;
  recorder::concurrent_before = concurrent;
  recorder::current.grid = {grid.width, grid.height, grid.depth};
  recorder::current.threadgroup = {threads.width, threads.height, threads.depth};
  recorder::calls.push_back(std::exchange(recorder::current, {}));
}

}  // namespace mlx::core::metal
