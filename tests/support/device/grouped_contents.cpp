// SPDX-License-Identifier: Apache-2.0
#include "support/device/grouped_contents.h"

#include "support/random.h"

namespace switchyard::testing {
namespace {

enum class Content : std::uint64_t { a, b, matrix, bias, factors };

Tensor random_content(const GemmGroup& group, Content what, int part, const Shape& shape,
                      Dtype dtype) {
  const auto seed = (group.id * 8 + static_cast<std::uint64_t>(what)) * 2;
  return Random(seed + static_cast<std::uint64_t>(part)).tensor(shape, dtype);
}

// c[r, p · N + n] = Σ_k a[r, k] · B_p[n, k] + factor · bias_p[n]
Doubles expected_forward(const GroupedSetup& setup, const GemmGroup& group) {
  const auto a = doubles_of(a_of(setup, group));
  const auto factors = doubles_of(factors_of(setup, group));
  auto c = zeros({group.rows, other_columns(setup)});
  for (int part = 0; part < setup.parts; ++part) {
    const auto b = doubles_of(matrix_of(setup, group, part));
    const auto bias = doubles_of(bias_of(setup, group, part));
    for (std::int64_t r = 0; r < group.rows; ++r) {
      const double factor = setup.has_factors ? factors.row(r)[0] : 1.0;
      for (std::int64_t n = 0; n < setup.matrix_rows; ++n) {
        double sum = has_bias(setup, group) ? factor * bias.row(0)[n] : 0.0;
        for (std::int64_t k = 0; k < setup.matrix_columns; ++k) sum += a.row(r)[k] * b.row(n)[k];
        c.row(r)[part * setup.matrix_rows + n] = sum;
      }
    }
  }
  return c;
}

// c[r, n] = Σ_p Σ_k a[r, p · K + k] · B_p[k, n]
Doubles expected_input_gradient(const GroupedSetup& setup, const GemmGroup& group) {
  const auto a = doubles_of(a_of(setup, group));
  auto c = zeros({group.rows, other_columns(setup)});
  for (int part = 0; part < setup.parts; ++part) {
    const auto b = doubles_of(matrix_of(setup, group, part));
    for (std::int64_t r = 0; r < group.rows; ++r) {
      for (std::int64_t k = 0; k < setup.matrix_rows; ++k) {
        const double factor = a.row(r)[part * setup.matrix_rows + k];
        for (std::int64_t n = 0; n < setup.matrix_columns; ++n) {
          c.row(r)[n] += factor * b.row(k)[n];
        }
      }
    }
  }
  return c;
}

// C_p[m, n] (+)= Σ_r a[r, p · M + m] · b[r, n]
Doubles expected_weight_gradient(const GroupedSetup& setup, const GemmGroup& group, int part) {
  const auto a = doubles_of(a_of(setup, group));
  const auto b = doubles_of(b_of(setup, group));
  auto c = setup.accumulate ? doubles_of(matrix_of(setup, group, part))
                            : zeros({setup.matrix_rows, setup.matrix_columns});
  for (std::int64_t r = 0; r < group.rows; ++r) {
    for (std::int64_t m = 0; m < setup.matrix_rows; ++m) {
      const double factor = a.row(r)[part * setup.matrix_rows + m];
      for (std::int64_t n = 0; n < setup.matrix_columns; ++n) c.row(m)[n] += factor * b.row(r)[n];
    }
  }
  return c;
}

}  // namespace

std::int64_t a_columns(const GroupedSetup& setup) {
  return setup.form == GemmForm::forward ? setup.matrix_columns : setup.parts * setup.matrix_rows;
}
std::int64_t other_columns(const GroupedSetup& setup) {
  return setup.form == GemmForm::forward ? setup.parts * setup.matrix_rows : setup.matrix_columns;
}
Dtype matrix_dtype(const GroupedSetup& setup) {
  return setup.form == GemmForm::weight_gradient ? setup.gradient_dtype : setup.dtype;
}

Tensor a_of(const GroupedSetup& setup, const GemmGroup& group) {
  return random_content(group, Content::a, 0, {group.rows, a_columns(setup)}, setup.dtype);
}
Tensor b_of(const GroupedSetup& setup, const GemmGroup& group) {
  return random_content(group, Content::b, 0, {group.rows, other_columns(setup)}, setup.dtype);
}
Tensor matrix_of(const GroupedSetup& setup, const GemmGroup& group, int part) {
  return random_content(group, Content::matrix, part, {setup.matrix_rows, setup.matrix_columns},
                        matrix_dtype(setup));
}
bool has_bias(const GroupedSetup& setup, const GemmGroup& group) {
  return setup.has_bias && group.id % 3 != 1;
}
Tensor bias_of(const GroupedSetup& setup, const GemmGroup& group, int part) {
  return random_content(group, Content::bias, part, {1, setup.matrix_rows}, setup.dtype);
}
Tensor factors_of(const GroupedSetup& /*setup*/, const GemmGroup& group) {
  return random_content(group, Content::factors, 0, {group.rows, 1}, Dtype::f32);
}

std::int64_t depth_of(const GroupedSetup& setup, const GemmGroup& group) {
  if (setup.form == GemmForm::forward) return setup.matrix_columns;
  if (setup.form == GemmForm::input_gradient) return setup.parts * setup.matrix_rows;
  return group.rows;
}

std::vector<Doubles> expected_of(const GroupedSetup& setup, const GemmGroup& group) {
  if (setup.form == GemmForm::forward) return {expected_forward(setup, group)};
  if (setup.form == GemmForm::input_gradient) return {expected_input_gradient(setup, group)};
  std::vector<Doubles> matrices;
  for (int part = 0; part < setup.parts; ++part) {
    matrices.push_back(expected_weight_gradient(setup, group, part));
  }
  return matrices;
}

std::ostream& operator<<(std::ostream& out, const GroupedSetup& setup) {
  const char* forms[] = {"forward", "input gradient", "weight gradient"};
  return out << forms[static_cast<int>(setup.form)] << " of " << name_of(setup.dtype) << ", "
             << setup.parts << " × [" << setup.matrix_rows << "," << setup.matrix_columns << "]"
             << (setup.accumulate ? ", added to " : ", matrices of ")
             << name_of(matrix_dtype(setup)) << ", spare " << setup.spare << ", gap " << setup.gap
             << (setup.kernels == GemmKernels::best ? "" : ", portable")
             << (setup.is_scheduled ? ", tickets and order" : "");
}

}  // namespace switchyard::testing
