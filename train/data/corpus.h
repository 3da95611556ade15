// The text that is trained on: this project's own, or what the user gave.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace switchyard::train {

// Text in two parts: pieces of it, spread over the whole, are held out and never trained on.
class Corpus {
 public:
  // The sources and documents of this project, as they were when it was built.
  static Corpus embedded();
  // A file, or all text files of a folder and those below it, in order of path; files that are not
  // text (a NUL byte in their first 8 KiB), links and hidden ones are left out. InvalidArgument
  // names a path that cannot be read, or that holds too little.
  static Corpus read(const std::filesystem::path& path);
  // `name` is what reports call it.
  Corpus(std::string name, std::string_view text);

  const std::string& name() const { return name_; }
  std::string_view training() const { return training_; }
  std::string_view held_out() const { return held_out_; }
  std::int64_t bytes() const {
    return static_cast<std::int64_t>(training_.size() + held_out_.size());
  }
  // Tells texts apart.
  std::uint64_t hash() const { return hash_; }

 private:
  std::string name_;
  std::string training_;
  std::string held_out_;
  std::uint64_t hash_ = 0;
};

// Of a path, or embedded where it is empty. All ranks of a process that hold it have the same one;
// who comes while it is read waits.
std::shared_ptr<const Corpus> shared_corpus(const std::string& path);

// The windows of `length` + 1 bytes that training sees: all of a text once, in an order of the
// seed's, then again in another. Window n is a function of (text, length, seed, n) alone, so n is
// all that a checkpoint keeps.
class WindowOrder {
 public:
  // The text must outlive this, and be longer than `length`.
  WindowOrder(std::string_view text, std::int64_t length, std::uint64_t seed);

  std::int64_t windows_in_an_epoch() const { return num_windows_; }
  // InvalidArgument if n is negative.
  std::string_view window(std::int64_t n) const;

 private:
  std::string_view text_;
  std::int64_t length_;
  std::uint64_t seed_;
  std::int64_t num_windows_;
};

// Up to `most` windows spread evenly over held-out text: the same for every run of a length.
std::vector<std::string_view> held_out_windows(std::string_view text, std::int64_t length,
                                               std::int64_t most);

}  // namespace switchyard::train
