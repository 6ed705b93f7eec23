// Makes a pipeline of every kernel of Metal libraries and prints how many threads a threadgroup of
// it may have at most, which falls as a thread needs more registers.
//
//   xcrun swift scripts/metal_pipelines.swift SHIPPED.metallib FREE.metallib
//
// SHIPPED is metal/kernels.metal as it is: its kernels say how many threads they are launched with,
// and a pipeline must allow exactly those. FREE is the same without that
// (-D'PAGED_KERNEL(THREADS)=[[kernel]] void'), so that the compiler's own figure shows. Attention
// kernels are made twice: without and with a window, a soft-cap and sinks. Exit status 1 if a
// pipeline cannot be made, or is launched with more threads than it allows.

import Foundation
import Metal

struct Limits {
  var threads: Int
  var width: Int
}

func fail(_ message: String) -> Never {
  FileHandle.standardError.write((message + "\n").data(using: .utf8)!)
  exit(1)
}

guard CommandLine.arguments.count == 3 else {
  fail("usage: metal_pipelines.swift SHIPPED.metallib FREE.metallib")
}
guard let device = MTLCreateSystemDefaultDevice() else {
  fail("this machine has no Metal device")
}
print("device: \(device.name)")

func limits(of path: String) throws -> [String: Limits] {
  let library = try device.makeLibrary(URL: URL(fileURLWithPath: path))
  var found: [String: Limits] = [:]
  for name in library.functionNames.sorted() {
    let isAttention = name.hasPrefix("paged_")
    for options in isAttention ? [false, true] : [false] {
      let constants = MTLFunctionConstantValues()
      var value = options
      for index in 4..<7 {
        constants.setConstantValue(&value, type: .bool, index: index)
      }
      let function = try library.makeFunction(name: name, constantValues: constants)
      let pipeline = try device.makeComputePipelineState(function: function)
      found[name + (options ? " with options" : "")] = Limits(
        threads: pipeline.maxTotalThreadsPerThreadgroup, width: pipeline.threadExecutionWidth)
    }
  }
  return found
}

do {
  let shipped = try limits(of: CommandLine.arguments[1])
  let free = try limits(of: CommandLine.arguments[2])
  var tooFew: [String] = []
  print("threads launched, threads allowed, lanes of a SIMD-group, kernel")
  for name in shipped.keys.sorted() {
    let launched = shipped[name]!.threads
    guard let allowed = free[name] else {
      fail("\(name) is in one library only")
    }
    print("\(launched) \(allowed.threads) \(allowed.width) \(name)")
    if allowed.width != 32 || launched > allowed.threads {
      tooFew.append(name)
    }
  }
  if !tooFew.isEmpty {
    fail("too few registers for their threads, so values are spilled: " + tooFew.joined(separator: ", "))
  }
} catch {
  fail("\(error)")
}
