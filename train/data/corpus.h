// SPDX-License-Identifier: Apache-2.0
// The text to train on: this project's own, or the user's.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace switchyard::train {

// Text in two parts: for training, and held out. Held-out pieces are spread over the whole text and
// never trained on.
class Corpus {
 public:
  // Returns the sources and documents of this project, as they were when it was built.
  static Corpus embedded();
  // Reads a file, or all text files below a folder in order of path. Skips links, hidden files and
  // files that are not text (a NUL byte in the first 8 KiB). Throws InvalidArgument that names a
  // path that cannot be read, or that holds too little or too much text.
  static Corpus read(const std::filesystem::path& path);
  // Reports show the text as `name`.
  Corpus(std::string name, std::string_view text);

  const std::string& name() const { return name_; }
  std::string_view training() const { return training_; }
  std::string_view held_out() const { return held_out_; }
  std::int64_t bytes() const {
    return static_cast<std::int64_t>(training_.size() + held_out_.size());
  }
  // A hash of the whole text, to tell corpora apart.
  std::uint64_t hash() const { return hash_; }

 private:
  std::string name_;
  std::string training_;
  std::string held_out_;
  std::uint64_t hash_ = 0;
};

// Returns the corpus at `path`, or the embedded one if it is empty. All ranks of a process share
// one object; callers block while another reads it.
std::shared_ptr<const Corpus> shared_corpus(const std::string& path);

// The sequence of windows of `length` + 1 bytes that training sees: the whole text once in an order
// derived from the seed, then again in another. Window n depends only on (text, length, seed, n),
// so n is all that a checkpoint stores.
class WindowOrder {
 public:
  // `text` must outlive this object and be longer than `length`.
  WindowOrder(std::string_view text, std::int64_t length, std::uint64_t seed);

  std::int64_t windows_in_an_epoch() const { return num_windows_; }
  // Throws InvalidArgument if n is negative.
  std::string_view window(std::int64_t n) const;

 private:
  std::string_view text_;
  std::int64_t length_;
  std::uint64_t seed_;
  std::int64_t num_windows_;
};

// Returns up to `most` windows spread evenly over held-out text, the same in every run with this
// length.
std::vector<std::string_view> held_out_windows(std::string_view text, std::int64_t length,
                                               std::int64_t most);

}  // namespace switchyard::train
