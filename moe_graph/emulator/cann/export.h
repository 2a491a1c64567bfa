// Marks a function as part of the emulated CANN interface. Everything else stays hidden.
#pragma once

#define CANN_API __attribute__((visibility("default")))
