// SPDX-License-Identifier: Apache-2.0
#include "core/local_socket.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <array>
#include <chrono>
#include <cstring>

#include "core/shared_pages.h"
#include "support/errors.h"
#include "switchyard/error.h"

namespace switchyard::local_socket_test {
namespace {

using namespace std::chrono_literals;
using Text = std::array<char, 8>;

Deadline soon() { return std::chrono::steady_clock::now() + 20ms; }
Deadline later() { return std::chrono::steady_clock::now() + 10s; }

class LocalSocket : public ::testing::Test {
 protected:
  Received receive(Descriptor& file, Deadline deadline) {
    return accepted_.receive(std::as_writable_bytes(std::span(text_)), file, deadline);
  }
  static bool send(const LocalConnection& to, const Text& text, int descriptor = -1) {
    return to.send(std::as_bytes(std::span(text)), descriptor, soon());
  }

  LocalListener listener_;
  LocalConnection connected_ = connect_to(listener_.name());
  LocalConnection accepted_ = listener_.accept(later());
  Text text_{};
};

TEST_F(LocalSocket, CarriesWholeMessagesInOrder) {
  EXPECT_TRUE(send(connected_, {"one"}));
  EXPECT_TRUE(send(connected_, {"two"}));
  Descriptor none;
  EXPECT_EQ(receive(none, later()), Received::message);
  EXPECT_STREQ(text_.data(), "one");
  EXPECT_EQ(receive(none, later()), Received::message);
  EXPECT_STREQ(text_.data(), "two");
  EXPECT_FALSE(none.is_open());
  EXPECT_EQ(receive(none, soon()), Received::nothing);
}

TEST_F(LocalSocket, CarriesDescriptorsWhoseMemoryBothSee) {
  const SharedPages pages(100);
  EXPECT_TRUE(send(connected_, {"file"}, pages.file().get()));
  Descriptor file;
  ASSERT_EQ(receive(file, later()), Received::message);
  ASSERT_TRUE(file.is_open());
  EXPECT_NE(file.get(), pages.file().get());
  const SharedPages same(std::move(file), 100);
  EXPECT_NE(same.bytes().data(), pages.bytes().data());
  same.bytes()[99] = std::byte{7};
  EXPECT_EQ(pages.bytes()[99], std::byte{7});
}

TEST_F(LocalSocket, TheEndOfTheOtherIsNoticed) {
  EXPECT_TRUE(send(connected_, {"last"}));
  connected_ = LocalConnection();
  Descriptor none;
  EXPECT_EQ(receive(none, later()), Received::message);
  EXPECT_EQ(receive(none, later()), Received::end);
  EXPECT_FALSE(send(accepted_, {"hello"}));
}

TEST_F(LocalSocket, TheLastMessageOfAPeerThatReadNothingStillArrives) {
  EXPECT_TRUE(send(accepted_, {"unread"}));
  EXPECT_TRUE(send(connected_, {"last"}));
  connected_ = LocalConnection();
  Descriptor none;
  EXPECT_EQ(receive(none, later()), Received::message);
  EXPECT_STREQ(text_.data(), "last");
  EXPECT_EQ(receive(none, later()), Received::end);
}

TEST_F(LocalSocket, AQueueThatStaysFullIsGivenUpAtTheDeadline) {
  bool is_sent = true;
  for (int i = 0; i < 100000 && is_sent; ++i) is_sent = send(connected_, {"more"});
  EXPECT_FALSE(is_sent);
}

TEST_F(LocalSocket, AMessageOfAnotherSizeEndsTheConnection) {
  const std::array<char, 3> few{};
  EXPECT_TRUE(connected_.send(std::as_bytes(std::span(few)), -1, soon()));
  Descriptor none;
  EXPECT_EQ(receive(none, later()), Received::end);
}

TEST_F(LocalSocket, NobodyIsWaitedForBeyondTheDeadline) {
  EXPECT_FALSE(listener_.accept(soon()).is_open());
}

TEST(LocalSocketErrors, AListenerThatIsGoneCannotBeReached) {
  LocalListener::Name name{};
  { name = LocalListener().name(); }
  const auto message = testing::error_of<Unsupported>([&] { connect_to(name); });
  EXPECT_NE(message.find("cannot connect to a local socket"), std::string::npos) << message;
}

}  // namespace
}  // namespace switchyard::local_socket_test
