// How the library reports trouble: a code to the caller, the words kept per thread for pw_last_error.
#pragma once
#include <cstdint>

namespace pw {

// Keeps the formatted words for pw_last_error of this thread and returns `code`.
int32_t fail(int32_t code, const char* format, ...) __attribute__((format(printf, 2, 3)));

}  // namespace pw
