// Prints what Metal says of this machine's GPU.
//
//   xcrun swift scripts/metal_device.swift
//
// Families are tried by number, so that those newer than the SDK show, too. Exit status 1 without
// a Metal device.

import Foundation
import Metal

guard let device = MTLCreateSystemDefaultDevice() else {
  print("no Metal device")
  exit(1)
}

func supported(_ name: String, _ base: Int, _ numbers: ClosedRange<Int>) -> String {
  let found = numbers.filter { number in
    guard let family = MTLGPUFamily(rawValue: base + number) else { return false }
    return device.supportsFamily(family)
  }
  return "\(name) families: " + (found.isEmpty ? "none" : found.map(String.init).joined(separator: " "))
}

print("name: \(device.name)")
print(supported("Apple", 1000, 1...15))
print(supported("Mac", 2000, 1...2))
print(supported("Common", 3000, 1...3))
print(supported("Metal", 4998, 3...7))  // MTLGPUFamily.metal3 is 5001
print("unified memory: \(device.hasUnifiedMemory)")
print("recommended working set: \(device.recommendedMaxWorkingSetSize) bytes")
print("largest buffer: \(device.maxBufferLength) bytes")
print("threadgroup memory: \(device.maxThreadgroupMemoryLength) bytes")
print("threads of a threadgroup: \(device.maxThreadsPerThreadgroup)")
