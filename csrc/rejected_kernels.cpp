// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#include "rejected_kernels.h"

#include <algorithm>
#include <atomic>
#include <limits>
#include <mutex>
#include <set>

namespace mlx_paged {

namespace {

std::mutex names_mutex;
std::set<std::string> rejected;       // guarded by it
std::vector<AllowedProduct> allowed;  // likewise
std::atomic<int> count{0};
std::atomic<bool> rejects_any{false};
std::atomic<bool> allows_any{false};
std::atomic<int> step_rows{-1};  // -1: not set
std::atomic<bool> tensor_kernels{false};
std::atomic<int> shortest_piece{0};

}  // namespace

void reject_kernels(const std::vector<std::string>& host_names) {
  std::lock_guard lock(names_mutex);
  rejected = {host_names.begin(), host_names.end()};
  rejects_any = !rejected.empty();
  count++;
}

std::vector<std::string> rejected_kernels() {
  std::lock_guard lock(names_mutex);
  return {rejected.begin(), rejected.end()};
}

bool is_rejected(const std::string& host_name) {
  if (!rejects_any) {
    return false;
  }
  std::lock_guard lock(names_mutex);
  return rejected.count(host_name) > 0;
}

int rejection_count() {
  return count;
}

bool allows_tensor_kernels() {
  return tensor_kernels;
}

void allow_tensor_kernels(bool allowed) {
  tensor_kernels = allowed;
  count++;
}

int allowed_step_rows(Gpu gpu) {
  int allowed = step_rows;
  return allowed >= 0 ? allowed : gpu == Gpu::apple ? 0 : std::numeric_limits<int>::max();
}

void allow_step_rows(int num_rows) {
  step_rows = num_rows;
}

void allow_products(const std::vector<AllowedProduct>& products) {
  std::lock_guard lock(names_mutex);
  allowed = products;
  allows_any = !products.empty();
}

std::vector<AllowedProduct> allowed_products() {
  std::lock_guard lock(names_mutex);
  return allowed;
}

bool allows_any_product() {
  return allows_any;
}

bool allows_product(const std::string& host_name, int num_rows) {
  std::lock_guard lock(names_mutex);
  return std::any_of(allowed.begin(), allowed.end(), [&](const auto& product) {
    return product.host_name == host_name && product.min_rows <= num_rows &&
           num_rows <= product.max_rows;
  });
}

int piece_tokens() {
  return shortest_piece;
}

void set_piece_tokens(int num_tokens) {
  shortest_piece = num_tokens;
}

}  // namespace mlx_paged
