// Attempts of several threads. An exception would end the program in another thread, so it is kept.
#pragma once

#include <exception>
#include <mutex>

class Attempts {
  public:
    // body(), then then(), by one thread at a time.
    template <class Body, class Then>
    void attempt(const Body& body, const Then& then) {
        std::exception_ptr error;
        try {
            body();
        } catch (...) {
            error = std::current_exception();
        }
        const std::lock_guard<std::mutex> held(mutex);
        then();
        if (error) failed = error;
    }

    // Throws what an attempt has thrown, if any has.
    void rethrow() const {
        if (failed) std::rethrow_exception(failed);
    }

  private:
    std::exception_ptr failed;
    std::mutex mutex;
};
