// SPDX-License-Identifier: Apache-2.0
// A program's locale changes neither what the library writes nor how it reads numbers.
#include <gtest/gtest.h>

#include <clocale>
#include <fstream>
#include <iterator>
#include <locale>

#include "support/errors.h"
#include "support/folder.h"
#include "switchyard/c/layers.h"
#include "switchyard/checkpoint.h"
#include "switchyard/error.h"
#include "switchyard/load_balancer.h"

namespace switchyard::locale_test {
namespace {

// 1234567.5 is 1.234.567,5.
class Commas : public std::numpunct<char> {
  char do_decimal_point() const override { return ','; }
  char do_thousands_sep() const override { return '.'; }
  std::string do_grouping() const override { return "\3"; }
};

class CommaLocale {
 public:
  CommaLocale()
      : before_(std::locale::global(std::locale(std::locale::classic(), new Commas))),
        c_before_(std::setlocale(LC_ALL, nullptr)) {
    for (const char* name : {"de_DE.UTF-8", "de_DE.utf8", "fr_FR.UTF-8"}) {
      if (std::setlocale(LC_ALL, name) != nullptr) break;  // where the system has one
    }
  }
  ~CommaLocale() {
    std::setlocale(LC_ALL, c_before_.c_str());
    std::locale::global(before_);
  }
  CommaLocale(const CommaLocale&) = delete;
  CommaLocale& operator=(const CommaLocale&) = delete;

 private:
  std::locale before_;
  std::string c_before_;
};

std::string bytes_of(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void save(const std::filesystem::path& path) {
  const auto comm = connect();
  save_checkpoint(
      *comm, path,
      {.tensors = {{"w", Tensor::zeros({1234, 5}, Dtype::f32)}}, .metadata = {{"rate", "0.5"}}});
}

TEST(HostLocale, ChangesNoNumberInAMessage) {
  const CommaLocale commas;
  EXPECT_EQ(testing::error_of<InvalidArgument>([] { LoadBalancer(2, {.rate = -1.5F}); }),
            "rate (-1.5) must be finite and not negative");
  EXPECT_EQ(testing::error_of<InvalidArgument>(
                [] { (void)Tensor::zeros({1234567}, Dtype::f32).view().slice(0, 12345678); }),
            "rows 0 to 12345678 are not a slice of [1234567]");
}

TEST(HostLocale, ChangesNoByteOfACheckpoint) {
  const testing::Folder folder;
  save(folder / "plain.safetensors");
  const CommaLocale commas;
  save(folder / "commas.safetensors");
  EXPECT_EQ(bytes_of(folder / "commas.safetensors"), bytes_of(folder / "plain.safetensors"));
  const auto checkpoint = Checkpoint::open(folder / "plain.safetensors");
  EXPECT_EQ(checkpoint.tensor("w").shape(), (Shape{1234, 5}));
  EXPECT_EQ(checkpoint.metadata().at("rate"), "0.5");
}

TEST(HostLocale, ChangesNoJson) {
  const testing::Folder folder;
  save(folder / "plain.safetensors");
  const auto contents = [&] {
    switchyard_checkpoint* checkpoint = nullptr;
    const char* json = nullptr;
    EXPECT_EQ(switchyard_checkpoint_open((folder / "plain.safetensors").c_str(), &checkpoint),
              switchyard_ok);
    EXPECT_EQ(switchyard_checkpoint_contents(checkpoint, &json), switchyard_ok);
    const std::string text = json;
    switchyard_checkpoint_free(checkpoint);
    return text;
  };
  const auto plain = contents();
  const CommaLocale commas;
  EXPECT_EQ(contents(), plain);
  EXPECT_NE(plain.find("1234"), std::string::npos);
}

}  // namespace
}  // namespace switchyard::locale_test
