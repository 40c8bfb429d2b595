// What the process says on stderr when an exception that nobody may catch ends it: the exception,
// the work that the thread was at, and where it was thrown.
//
// No exception crosses this project's code; one that comes all the same (an allocation that failed,
// most likely) ends the process, and somebody must be able to tell what asked for the memory.
#ifndef REFITD_DAEMON_PROCESS_LAST_WORDS_H_
#define REFITD_DAEMON_PROCESS_LAST_WORDS_H_

namespace refitd {

// Called once, early. The words wait for nobody: a stderr that takes none ends the process after
// kLastWordsSeconds.
void InstallLastWords();
inline constexpr unsigned kLastWordsSeconds = 2;

// Notes what this thread is at from now on, such as the name of a call. `what` must live as long as
// the process.
void NoteWork(const char* what);

}  // namespace refitd

#endif  // REFITD_DAEMON_PROCESS_LAST_WORDS_H_
