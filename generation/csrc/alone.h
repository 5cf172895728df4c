// A team of one.
#pragma once

#include <cstdint>

struct Alone {
    template <class Piece>
    void run(int64_t, int64_t pieces, const Piece& piece) {
        for (int64_t i = 0; i < pieces; i++) piece(i);
    }
    template <class Piece>
    void share(int64_t stage, int64_t pieces, const Piece& piece) {
        run(stage, pieces, piece);
    }
    int members() const { return 1; }
};
