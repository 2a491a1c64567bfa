#include "device_memory.h"

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

namespace cann {
namespace {

constexpr std::size_t kLargestCapacity = std::size_t{64} << 30;  // what an Ascend 910B card has
constexpr int kPoison = 0xFF;

struct Block {
  std::size_t size;
  int device;
};

struct Heap {
  std::mutex mutex;
  std::map<std::uintptr_t, Block> blocks;
  std::map<int, std::size_t> used;
};

// Never destroyed: torch_npu frees memory from static destructors.
Heap& heap() {
  static Heap* const instance = new Heap;
  return *instance;
}

// The block that holds `pointer`, or end(). The caller holds the lock.
std::map<std::uintptr_t, Block>::const_iterator find_block(const Heap& owner, const void* pointer) {
  const auto address = reinterpret_cast<std::uintptr_t>(pointer);
  auto next = owner.blocks.upper_bound(address);
  if (next == owner.blocks.begin()) {
    return owner.blocks.end();
  }
  const auto found = std::prev(next);
  return address < found->first + found->second.size ? found : owner.blocks.end();
}

}  // namespace

std::size_t device_capacity() {
  static const std::size_t capacity =
      std::min(kLargestCapacity, static_cast<std::size_t>(sysconf(_SC_PHYS_PAGES)) *
                                     static_cast<std::size_t>(sysconf(_SC_PAGESIZE)));
  return capacity;
}

std::size_t device_used(int device) {
  Heap& owner = heap();
  const std::lock_guard<std::mutex> lock(owner.mutex);
  const auto found = owner.used.find(device);
  return found == owner.used.end() ? 0 : found->second;
}

void* allocate_device(int device, std::size_t size) {
  const std::size_t free_bytes = device_capacity() - device_used(device);
  if (size > free_bytes) {
    return nullptr;
  }
  const std::size_t rounded =
      (std::max(size, std::size_t{1}) + kDeviceAlignment - 1) & ~(kDeviceAlignment - 1);
  if (rounded > free_bytes) {
    return nullptr;
  }
  void* const block = std::aligned_alloc(kDeviceAlignment, rounded);
  if (block == nullptr) {
    return nullptr;
  }
  std::memset(block, kPoison, rounded);
  Heap& owner = heap();
  const std::lock_guard<std::mutex> lock(owner.mutex);
  owner.blocks[reinterpret_cast<std::uintptr_t>(block)] = Block{rounded, device};
  owner.used[device] += rounded;
  return block;
}

bool free_device(void* block) {
  Heap& owner = heap();
  {
    const std::lock_guard<std::mutex> lock(owner.mutex);
    const auto found = owner.blocks.find(reinterpret_cast<std::uintptr_t>(block));
    if (found == owner.blocks.end()) {
      return false;
    }
    owner.used[found->second.device] -= found->second.size;
    owner.blocks.erase(found);
  }
  std::free(block);
  return true;
}

bool is_device_pointer(const void* pointer) {
  Heap& owner = heap();
  const std::lock_guard<std::mutex> lock(owner.mutex);
  return find_block(owner, pointer) != owner.blocks.end();
}

std::size_t bytes_available(const void* pointer) {
  Heap& owner = heap();
  const std::lock_guard<std::mutex> lock(owner.mutex);
  const auto found = find_block(owner, pointer);
  if (found == owner.blocks.end()) {
    return SIZE_MAX;
  }
  return found->first + found->second.size - reinterpret_cast<std::uintptr_t>(pointer);
}

}  // namespace cann
