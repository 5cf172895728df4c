// What the page calls has an export of its own name, C's types, and sizes in 32 bits.
#pragma once

#define EXPORT(name) extern "C" __attribute__((export_name(#name)))
