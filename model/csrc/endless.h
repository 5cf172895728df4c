// The attention of a model without an end: ALiBi and a window, as rules for calls of one head.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "rules.h"

class Endless {
  public:
    // window: keys that a query sees, its own among them; 0 for a model with a table of positions. For SLOPED
    // the slopes are those of Press, Smith & Lewis 2022 (arXiv:2108.12409), for half of it twice these.
    Endless(int64_t heads, int64_t window) {
        int64_t power = 1;
        while (2 * power <= heads) power *= 2;
        const double step = 8.0 / static_cast<double>(power);
        for (int64_t h = 0; window > 0 && h < heads; h++) {
            const double n = static_cast<double>(h < power ? h + 1 : h - power) + (h < power ? 0 : 0.5);
            slopes.push_back(static_cast<float>(std::exp2(-step * n) * SLOPED / static_cast<double>(window)));
        }
        for (const float& slope : slopes) {
            Rules& row = by_head.emplace_back(Rules{});
            row.left = window - 1;
            row.slopes = &slope;
        }
    }
    Endless(const Endless&) = delete;
    Endless& operator=(const Endless&) = delete;

    const Rules* rules(int64_t head) const { return by_head.empty() ? nullptr : &by_head[head]; }

  private:
    static constexpr double SLOPED = 256;
    std::vector<float> slopes;
    std::vector<Rules> by_head;
};
