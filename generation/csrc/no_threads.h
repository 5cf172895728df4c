// Team, Member and Attempts where there are no threads: WebAssembly. The caller works alone, so nothing here is
// called.
#pragma once

#include <cstdint>

struct Member {
    int thread, members;

    template <class Piece>
    void run(int64_t, int64_t, const Piece&) {}
    template <class Piece>
    void share(int64_t, int64_t, const Piece&) {}
};

class Team {
  public:
    struct Delete {
        void operator()(Team* team) const { delete team; }
    };

    Team(int64_t, int) {}
    bool ours() const { return false; }
    void settle() const {}
    template <class Work>
    void take_turn(int, const Work& work) {
        Member caller{0, 1};
        work(caller);
    }
};

class Attempts {
  public:
    template <class Body, class Then>
    void attempt(const Body& body, const Then& then) {
        body();
        then();
    }
    void rethrow() const {}
};
