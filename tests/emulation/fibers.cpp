// SPDX-License-Identifier: Apache-2.0
#include "emulation/fibers.h"

#include <sys/mman.h>

#include <cstdint>
#include <new>
#include <utility>

// Saves what a function must preserve, and the stack pointer, and continues on another stack.
extern "C" void emulation_switch(void** save, void* load);
asm(R"(
.text
.globl emulation_switch
.type emulation_switch, @function
emulation_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emulation_switch, .-emulation_switch
.globl emulation_begin
.type emulation_begin, @function
emulation_begin:
  movq %rbx, %rdi
  callq *%rbp
  ud2
.size emulation_begin, .-emulation_begin
)");
extern "C" void emulation_begin();

namespace emulation {
namespace {

constexpr std::size_t kPage = 4096;
constexpr std::size_t kStackBytes = std::size_t{256} << 10;

}  // namespace

Fiber::Fiber() {
  // The page below the stack stays unmapped, so that a stack that is too deep crashes at once.
  void* const memory = mmap(nullptr, kStackBytes + kPage, PROT_NONE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  stack_ = static_cast<std::byte*>(memory);
  if (mprotect(stack_ + kPage, kStackBytes, PROT_READ | PROT_WRITE) != 0) throw std::bad_alloc();
}

Fiber::~Fiber() { munmap(stack_, kStackBytes + kPage); }

void Fiber::start(std::function<void()> body) {
  body_ = std::move(body);
  is_done_ = false;
  // emulation_switch() pops these, last one first: r15, r14, r13, r12, rbx, rbp, return address.
  auto* top = reinterpret_cast<std::uintptr_t*>(stack_ + kPage + kStackBytes - 16);
  *--top = reinterpret_cast<std::uintptr_t>(&emulation_begin);
  *--top = reinterpret_cast<std::uintptr_t>(&Fiber::enter);
  *--top = reinterpret_cast<std::uintptr_t>(this);
  for (int i = 0; i < 4; ++i) *--top = 0;
  mine_ = top;
}

void Fiber::enter(Fiber* fiber) {
  fiber->body_();
  fiber->is_done_ = true;
  fiber->suspend();
}

void Fiber::resume() { emulation_switch(&callers_, mine_); }
void Fiber::suspend() { emulation_switch(&mine_, callers_); }

}  // namespace emulation
