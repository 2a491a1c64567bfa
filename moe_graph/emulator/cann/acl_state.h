// What the emulated machine is: product and devices, set once by the loader, and the device that
// each thread works on.
#pragma once

namespace cann {

// Names the product (as aclrtGetSocName does) and the number of devices. Called before any acl
// function.
void configure(const char* soc_name, int device_count);

const char* soc_name();
int device_count();

// Device of the calling thread, 0 until it sets another.
int current_device();

// False when `device` does not exist.
bool set_current_device(int device);

}  // namespace cann
