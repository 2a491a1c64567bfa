// "Device memory" of the emulated NPUs: host memory, aligned and poisoned, with every block known.
#pragma once

#include <cstddef>

namespace cann {

// Alignment that CANN guarantees for device memory.
constexpr std::size_t kDeviceAlignment = 512;

// Bytes that one emulated device offers.
std::size_t device_capacity();

// Bytes of `device` that are in use.
std::size_t device_used(int device);

// Returns a block of `size` bytes filled with 0xFF (a NaN in every floating type), or nullptr when
// the capacity of `device` would be exceeded.
void* allocate_device(int device, std::size_t size);

// Frees a block. False when `block` is not the start of a live one.
bool free_device(void* block);

// True when `pointer` lies in a live device block.
bool is_device_pointer(const void* pointer);

// Bytes from `pointer` to the end of its device block; SIZE_MAX for memory that is not ours.
std::size_t bytes_available(const void* pointer);

}  // namespace cann
