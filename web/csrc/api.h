// A function that the page calls: exported by its name, with C's types and sizes in 32 bits.
#pragma once

#define EXPORT(name) extern "C" __attribute__((export_name(#name)))
