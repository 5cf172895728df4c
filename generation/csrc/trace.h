// What each thread of the decoder did, and when.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <vector>

// Work of one kind, from begin to end in nanoseconds of the steady clock. Thread 0 is the caller; only it has
// spans of the kind `waiting`, for the others.
struct Span {
    const char* kind;
    int thread;
    int64_t begin, end;
};

// Records spans while it is switched on; it is off at first.
class Trace {
  public:
    explicit Trace(int threads) : tracks(threads) {}

    void record(bool on) {
        for (Track& track : tracks) track.spans.reserve(on ? EXPECTED_SPANS : 0);
        recording = on;
    }

    // The spans since the last call, thread by thread, each in order. No thread may be adding one.
    std::vector<Span> take() {
        std::vector<Span> all;
        for (Track& track : tracks) {
            all.insert(all.end(), track.spans.begin(), track.spans.end());
            track.spans.clear();
        }
        return all;
    }

    // Runs body(), with a span if recording. Helper threads call it only inside a piece: the caller reads the
    // spans when all pieces are done.
    template <class Body>
    void timed(const char* kind, int64_t thread, const Body& body) {
        const int64_t begin = recording ? now() : 0;
        body();
        if (recording) tracks[thread].spans.push_back({kind, static_cast<int>(thread), begin, now()});
    }

    // Runs body(), with a span of the caller's wait for the others: from the end of its last piece to the end
    // of body. A helper's wait may outlast the call, so it appears only as a gap between its spans.
    template <class Body>
    void timed_waiting(int thread, const Body& body) {
        if (thread > 0 || !recording) return body();
        int64_t begin = now();
        body();
        std::vector<Span>& spans = tracks[0].spans;
        if (!spans.empty()) begin = std::max(begin, spans.back().end);
        spans.push_back({"waiting", 0, begin, now()});
    }

  private:
    static constexpr int EXPECTED_SPANS = 1 << 16;

    static int64_t now() {
        const auto since = std::chrono::steady_clock::now().time_since_epoch();
        return std::chrono::duration_cast<std::chrono::nanoseconds>(since).count();
    }

    struct alignas(64) Track {  // a cache line each: threads write at the same time
        std::vector<Span> spans;
    };
    bool recording = false;
    std::vector<Track> tracks;
};
