// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include "crc32.h"

#include <array>
#include <cstdlib>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

// Folding with carry-less products, after Gopal et al., "Fast CRC Computation for Generic
// Polynomials Using PCLMULQDQ Instruction" (Intel, 2009). A CRC is the remainder of the message, a
// polynomial over two elements, by a fixed one. 16 bytes that are n bits before others are added to
// those after a product with x^n, which leaves the remainder as it is:
//
//     [ a ][ b ][ c ][ d ][ e ][ f ][ g ][ h ]  ->  [ e' ][ f' ][ g' ][ h' ]  ->  [ h" ][ tail ]
//
// Polynomials are bit-reflected, as in zlib: the lowest bit is the highest power.

namespace mlx_paged {

#if defined(__x86_64__)

namespace {

constexpr uint32_t kPolynomial = 0xEDB88320;

constexpr uint32_t times_x(uint32_t a) {
  return (a >> 1) ^ (a & 1 ? kPolynomial : 0);
}

// x^n modulo the polynomial, as a factor for half of a vector. The product of two reflected factors
// is one bit too low, hence the shift.
constexpr int64_t power(int n) {
  uint32_t a = 0x80000000;
  for (int i = 0; i < n; i++) {
    a = times_x(a);
  }
  return int64_t(a) << 1;
}

constexpr std::array<uint32_t, 256> table() {
  std::array<uint32_t, 256> entries{};
  for (uint32_t byte = 0; byte < 256; byte++) {
    entries[byte] = byte;
    for (int i = 0; i < 8; i++) {
      entries[byte] = times_x(entries[byte]);
    }
  }
  return entries;
}

uint32_t by_bytes(uint32_t crc, const uint8_t* data, size_t size) {
  static constexpr auto kTable = table();
  for (size_t i = 0; i < size; i++) {
    crc = kTable[(crc ^ data[i]) & 0xFF] ^ (crc >> 8);
  }
  return crc;
}

constexpr size_t kVector = sizeof(__m128i), kLanes = 4;

// Adds a vector to the one that is kDistance bits after it.
template <int kDistance>
__attribute__((target("pclmul"))) __m128i fold(__m128i a, __m128i later) {
  // The lower half has the higher powers. A factor has 32 bits of its 64, hence the 32.
  const __m128i factors = _mm_set_epi64x(power(kDistance - 32), power(kDistance + 32));
  __m128i low = _mm_clmulepi64_si128(a, factors, 0x00);
  __m128i high = _mm_clmulepi64_si128(a, factors, 0x11);
  return _mm_xor_si128(_mm_xor_si128(low, high), later);
}

__m128i load(const uint8_t* data) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(data));
}

}  // namespace

bool has_fast_crc32() {
  return __builtin_cpu_supports("pclmul");
}

__attribute__((target("pclmul"))) uint32_t crc32(const uint8_t* data, size_t size) {
  constexpr size_t kStride = kLanes * kVector;
  uint32_t crc = 0xFFFFFFFF;
  if (size >= 2 * kStride) {
    __m128i lanes[kLanes];
    for (size_t i = 0; i < kLanes; i++) {
      lanes[i] = load(data + i * kVector);
    }
    lanes[0] = _mm_xor_si128(lanes[0], _mm_cvtsi32_si128(int(crc)));
    for (data += kStride, size -= kStride; size >= kStride; data += kStride, size -= kStride) {
      for (size_t i = 0; i < kLanes; i++) {
        lanes[i] = fold<8 * kStride>(lanes[i], load(data + i * kVector));
      }
    }
    for (size_t i = 1; i < kLanes; i++) {
      lanes[i] = fold<8 * kVector>(lanes[i - 1], lanes[i]);
    }
    uint8_t rest[kVector];
    std::memcpy(rest, &lanes[kLanes - 1], kVector);
    crc = by_bytes(0, rest, kVector);
  }
  return ~by_bytes(crc, data, size);
}

#else

// zlib uses the instructions of Apple's processors.
bool has_fast_crc32() {
  return false;
}

uint32_t crc32(const uint8_t*, size_t) {
  std::abort();
}

#endif

}  // namespace mlx_paged
