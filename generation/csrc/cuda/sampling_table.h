// The numeric settings of a text, each with the value that changes nothing. Their order here holds for the
// native decoder, the kernels of all engines, and the page; generation/engines/slots.py reads it.
#pragma once

#define SAMPLING_NUMBERS(NUMBER)  \
    NUMBER(temperature, 1)        \
    NUMBER(top_k, 0)              \
    NUMBER(top_p, 1)              \
    NUMBER(min_p, 0)              \
    NUMBER(typical_p, 1)          \
    NUMBER(repetition_penalty, 1) \
    NUMBER(presence_penalty, 0)   \
    NUMBER(frequency_penalty, 0)
