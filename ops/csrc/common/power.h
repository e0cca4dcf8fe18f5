// Powers in integer arithmetic: no floating-point operation, so neither a compiler nor its flags
// can change a bit of a result. Logarithms are Q54: 2^54 is 1. Relative error of a power: below
// 2^-51.
//
// Both functions take the first 6 of their argument's bits from a table, and the rest, below 2^-6,
// by a polynomial. The polynomials interpolate log2(1 + x) / x and (2^x - 1) / x at the Chebyshev
// nodes of [0, 2^-6], with 7 and 6 terms: what they leave out is below 2^-63 and 2^-68. The table
// of powers, its polynomial and all products are rounded down, so that 2^x stays below 2 and does
// not fall between two entries. test_host_arithmetic.py computes all these numbers anew.
#pragma once
#include "common/host_device.h"

namespace gear {

inline constexpr int kMassBits = 24;       // the mass of priority 1 is 2^24
inline constexpr int kMostMassBits = 40;   // masses are at most 2^40, of large tables less
inline constexpr int kMostTotalBits = 62;  // the sum of all masses is below 2^62
inline constexpr int kExactMassBits = 6;   // masses below 2^6 are rounded by more than 1 / 128
inline constexpr uint64_t kOneQ62 = uint64_t{1} << 62;
inline constexpr int kLogBits = 54;
inline constexpr int kTableBits = 6;

// Normalisation of importance weights: by nothing, the largest of the batch, or of the table.
enum Normalize : int64_t { kNotNormalized = 0, kByBatch = 1, kByTable = 2 };

// floor(a * b / 2^62).
GEAR_HOST_DEVICE uint64_t MulQ62(uint64_t a, uint64_t b) {
  return (MulHi(a, b) << 2) | ((a * b) >> 62);
}

// 1 / (1 + i / 64), Q63, rounded up.
GEAR_HOST_DEVICE const uint64_t* InverseTable() {
  alignas(16) static constexpr uint64_t kInverse[1 << kTableBits] = {
      9223372036854775808u, 9081474005518548488u, 8943875914525843208u, 8810385229234412713u,
      8680820740569200761u, 8555011744329067417u, 8432797290838652168u, 8314025498009938757u,
      8198552921648689608u, 8086243977516515777u, 7976970410252779078u, 7870610804782742023u,
      7767050136298758576u, 7666179355307865607u, 7567895004598790407u, 7472098865300071541u,
      7378697629483820647u, 7287602597021057429u, 7198729394618361607u, 7111997715165128334u,
      7027331075698876807u, 6944656592455360609u, 6863904771612856416u, 6785009314467881055u,
      6707906935894382406u, 6632537195041636537u, 6558842337318951686u, 6486767146798963206u,
      6416258808246800563u, 6347266778050598406u, 6279742663390485657u, 6213640109039006861u,
      6148914691236517206u, 6085523818130986101u, 6023426636313322977u, 5962583943017228806u,
      5902958103587056518u, 5844512973848570810u, 5787213827046133841u, 5731027285035977202u,
      5675921253449092805u, 5621864860559101445u, 5568828399610430677u, 5516783274380426652u,
      5465701947765793072u, 5415557893199134420u, 5366325548715505925u, 5317980273501852719u,
      5270498306774157605u, 5223856728838103113u, 5178033424199172384u, 5133007046597440450u,
      5088756985850910791u, 5045263336399193605u, 5002506867446658066u, 4960468994610971864u,
      4919131752989213765u, 4878477771559550841u, 4838490248841849605u, 4799152929745574405u,
      4760450083537948805u, 4722366482869645214u, 4684887383799251205u, 4647998506761461825u,
  };
  return kInverse;
}

// -log2(kInverse[i]), Q62.
GEAR_HOST_DEVICE const uint64_t* LogTable() {
  alignas(16) static constexpr uint64_t kLog2[1 << kTableBits] = {
      0x0000000000000000u, 0x016E79685C2D2299u, 0x02D75A6EB1DFB0E6u, 0x043ACE27E8A7E6ACu,
      0x0598FDBEB244C59Fu, 0x06F210902B6AEE98u, 0x08462C466D3CF1CBu, 0x099574F13C570D0Fu,
      0x0AE00D1CFDEB43CFu, 0x0C2615E81781D97Fu, 0x0D67AF16DA7649F7u, 0x0EA4F726192CB7E4u,
      0x0FDE0B5C81340511u, 0x111307DAD30B75CBu, 0x124407AB0E073982u, 0x137124CEA4CDECD9u,
      0x149A784BCD1B8AFEu, 0x15C01A39FBD6879Fu, 0x16E221CD9D0CDE57u, 0x1800A563161C5433u,
      0x191BBA891F1708B4u, 0x1A33760A7F60509Du, 0x1B47EBF73882A0A3u, 0x1C592FAD295B567Eu,
      0x1D6753E032EA0EFEu, 0x1E726AA1E754D20Bu, 0x1F7A8568CB06CECEu, 0x207FB5172F32FE67u,
      0x21820A01AC754CB0u, 0x228193F543CA873Cu, 0x237E623D2BA01BC7u, 0x247883A84E4F900Fu,
      0x2570068E7EF5A1E7u, 0x2664F8D569394D90u, 0x275767F54042CD99u, 0x284760FD30D552CDu,
      0x2934F0979A3715FCu, 0x2A20230E1151F1BBu, 0x2B09044D313A6786u, 0x2BEF9FE83C135D71u,
      0x2CD4011C8F11979Au, 0x2DB632D4EC3293B3u, 0x2E963FAC9C0EA78Du, 0x2F7431F26A05C813u,
      0x305013AB7CE0E5B7u, 0x3129EE960DDF1680u, 0x3201CC2C000599FCu, 0x32D7B5A5596BEBDFu,
      0x33ABB3FAA02166CCu, 0x347DCFE71C303DA0u, 0x354E11EB0029A6F9u, 0x361C824D7990D7AFu,
      0x36E9291EAA65B496u, 0x37B40E398CFCDB69u, 0x387D3945C340AA66u, 0x3944B1B952662C6Bu,
      0x3A0A7EDA4C112CE5u, 0x3ACEA7C065D41DFCu, 0x3B9133567FEAD8BCu, 0x3C52285C1C02803Eu,
      0x3D118D66C4D4E553u, 0x3DCF68E36752A0FAu, 0x3E8BC1179E0CAA9Bu, 0x3F469C22EF8466C4u,
  };
  return kLog2;
}

// 2^(i / 64), Q62.
GEAR_HOST_DEVICE const uint64_t* PowerTable() {
  alignas(16) static constexpr uint64_t kPower[1 << kTableBits] = {
      4611686018427387904u, 4661903986662671289u, 4712668792719003883u, 4763986391269842979u,
      4815862801830788490u, 4868304109465667592u, 4921316465500308115u, 4974906088244084429u,
      5029079263719320435u, 5083842346398635250u, 5139201759950318048u, 5195163997991819502u,
      5251735624851448219u, 5308923276338361493u, 5366733660520940720u, 5425173558513642752u,
      5484249825272419511u, 5543969390398799154u, 5604339258952723100u, 5665366512274234280u,
      5727058308814112982u, 5789421884973557729u, 5852464555953009676u, 5916193716610220111u,
      5980616842327661685u, 6045741489889385140u, 6111575298367424380u, 6178125990017853851u,
      6245401371186603363u, 6313409333225136570u, 6382157853416100551u, 6451654995909055044u,
      6521908912666391106u, 6592927844419550152u, 6664720121635655540u, 6737294165494670077u,
      6810658488877194079u, 6884821697363019841u, 6959792490240559659u, 7035579661527265795u,
      7112192101001162094u, 7189638795243608238u, 7267928828693418961u, 7347071384712461870u,
      7427075746662858865u, 7507951298995917514u, 7589707528352920109u, 7672354024677899535u,
      7755900482342532474u, 7840356701283281882u, 7925732588150922154u, 8012038157472581777u,
      8099283532826439816u, 8187478948029213992u, 8276634748336579668u, 8366761391656660532u,
      8457869449776733335u, 8549969609603290562u, 8643072674415606501u, 8737189565132953756u,
      8832331321595618838u, 8928509103859867100u, 9025734193507008925u, 9124017994966720698u,
  };
  return kPower;
}

// The tables, wherever they lie: a kernel may have copied them (power_cuda.h).
struct PowerTables {
  const uint64_t *inverse, *logs, *powers;
};

GEAR_HOST_DEVICE PowerTables TablesInMemory() { return {InverseTable(), LogTable(), PowerTable()}; }

// log2(x) in [0, 1], Q62, for x in [1, 2), Q63; exactly 0 for 1.
GEAR_HOST_DEVICE uint64_t Log2OfSignificand(uint64_t x,
                                            const PowerTables& tables = TablesInMemory()) {
  const uint64_t entry = x << 1 >> (64 - kTableBits);
  const uint64_t rest = MulQ62(x, tables.inverse[entry]);  // Q64: the 1 before it is shifted out
  uint64_t b = 906295301149760215u;
  b = 1107936214076780330u - MulHi(rest, b);
  b = 1330641342918730110u - MulHi(rest, b);
  b = 1663314082862784279u - MulHi(rest, b);
  b = 2217752182832675559u - MulHi(rest, b);
  b = 3326628274460942658u - MulHi(rest, b);
  b = 6653256548922161223u - MulHi(rest, b);
  return tables.logs[entry] + MulHi(rest, b);
}

// 2^x in [1, 2), Q62, for x in [0, 1), Q64; exactly 1 for 0.
GEAR_HOST_DEVICE uint64_t Exp2Fraction(uint64_t x, const PowerTables& tables = TablesInMemory()) {
  const uint64_t power = tables.powers[x >> (64 - kTableBits)];
  const uint64_t rest = x << kTableBits >> kTableBits;
  uint64_t b = 713668068253643u;
  b = 6148960213822094u + MulHi(rest, b);
  b = 44355792000417296u + MulHi(rest, b);
  b = 255967521893105676u + MulHi(rest, b);
  b = 1107849223398936668u + MulHi(rest, b);
  b = 3196577161300663914u + MulHi(rest, b);
  return power + MulQ62(power, MulHi(rest, b));
}

// log2(x), Q54; x > 0. Exact for powers of two.
GEAR_HOST_DEVICE int64_t Log2(uint64_t x, const PowerTables& tables = TablesInMemory()) {
  const int top = HighestBit(x);
  const uint64_t fraction = (Log2OfSignificand(x << (63 - top), tables) + 128) >> (62 - kLogBits);
  return (int64_t{top} << kLogBits) + static_cast<int64_t>(fraction);
}

// log * factor, the factor in [0, 1] as Q62. Rounds towards zero, so that it is odd in the log.
GEAR_HOST_DEVICE int64_t Scale(int64_t log, uint64_t factor) {
  const uint64_t sign = static_cast<uint64_t>(log >> 63);
  const uint64_t magnitude = MulQ62((static_cast<uint64_t>(log) ^ sign) - sign, factor);
  return static_cast<int64_t>((magnitude ^ sign) - sign);
}

// significand / 2^62 * 2^exponent, the significand in [1, 2) as Q62.
struct Power {
  uint64_t significand;
  int exponent;
};

// 2^log.
GEAR_HOST_DEVICE Power Exp2(int64_t log, const PowerTables& tables = TablesInMemory()) {
  // Shifting the whole part out leaves the fraction, also of a negative log.
  return {Exp2Fraction(static_cast<uint64_t>(log) << (64 - kLogBits), tables),
          static_cast<int>(log >> kLogBits)};
}

// Finite and at least 0; -0.0 is 0.
GEAR_HOST_DEVICE bool IsPriority(uint32_t bits) {
  return bits < 0x7F800000u || bits == 0x80000000u;
}

// The bits of a priority without the sign of -0.0: they are ordered as the priorities are.
GEAR_HOST_DEVICE uint32_t OrderOf(uint32_t bits) { return bits & 0x7FFFFFFFu; }

// A float32 that is finite and above 0: mantissa * 2^exponent.
struct FloatParts {
  uint64_t mantissa;
  int exponent;
};

GEAR_HOST_DEVICE FloatParts PartsOf(uint32_t bits) {
  const uint32_t biased = bits >> 23, low = bits & 0x7FFFFFu;
  return {biased != 0 ? (low | 0x800000u) : low,
          (biased != 0 ? static_cast<int>(biased) : 1) - 150};
}

// log2(priority^alpha); alpha in [0, 1] as Q62. `bits`: of a priority above 0.
GEAR_HOST_DEVICE int64_t LogOfPriority(uint32_t bits, uint64_t alpha,
                                       const PowerTables& tables = TablesInMemory()) {
  const FloatParts x = PartsOf(bits);
  return Scale(Log2(x.mantissa, tables) + x.exponent * (int64_t{1} << kLogBits), alpha);
}

// priority^alpha, likewise.
GEAR_HOST_DEVICE Power PowerOfPriority(uint32_t bits, uint64_t alpha, const PowerTables& tables) {
  if (alpha == kOneQ62) {  // exact
    const FloatParts x = PartsOf(bits);
    const int top = HighestBit(x.mantissa);
    return {x.mantissa << (62 - top), top + x.exponent};
  }
  return Exp2(LogOfPriority(bits, alpha, tables), tables);
}

// How priorities become masses.
struct MassScale {
  uint64_t alpha;  // Q62
  int most_bits;   // log2 of the largest mass, in [1, kMostMassBits]
};

struct Mass {
  uint64_t value;
  bool clamped;  // the power is above the largest mass, or so small that rounding changes it
};

// round(power * 2^24), halves up, clamped to [1, 2^most_bits].
GEAR_HOST_DEVICE Mass MassOfPower(Power power, int most_bits) {
  const int shift = 62 - kMassBits - power.exponent;
  if (shift > 63) return {1, true};
  const int least_shift = 62 - most_bits;
  if (shift < least_shift || (shift == least_shift && power.significand > kOneQ62))
    return {uint64_t{1} << most_bits, true};
  const uint64_t mass = ((power.significand >> (shift - 1)) + 1) >> 1;
  return {mass, mass < (uint64_t{1} << kExactMassBits)};
}

// The mass of priority^alpha; 0 for priority 0. `bits`: of a priority, see IsPriority.
GEAR_HOST_DEVICE Mass MassOfPriority(uint32_t bits, MassScale scale,
                                     const PowerTables& tables = TablesInMemory()) {
  if (OrderOf(bits) == 0) return {0, false};
  return MassOfPower(PowerOfPriority(bits, scale.alpha, tables), scale.most_bits);
}

// The float32 nearest to a power, ties to even; the largest one beyond the range, 0 below the
// smallest normal one.
GEAR_HOST_DEVICE uint32_t FloatBits(Power power) {
  constexpr uint32_t kLargest = 0x7F7FFFFFu;
  constexpr int kDrop = 62 - 23;
  if (power.exponent < -126) return 0;
  if (power.exponent > 127) return kLargest;
  const uint64_t is_odd = power.significand >> kDrop & 1;
  const uint64_t below_half = (uint64_t{1} << (kDrop - 1)) - 1;
  const auto kept = static_cast<uint32_t>((power.significand + below_half + is_odd) >> kDrop);
  // Its leading one, or two after a carry, is added to the exponent.
  return Min((static_cast<uint32_t>(power.exponent + 126) << 23) + kept, kLargest);
}

// The bits of 2^(log * beta) as float32; beta in [0, 1] as Q62.
GEAR_HOST_DEVICE uint32_t ImportanceOfLog(int64_t log, uint64_t beta,
                                          const PowerTables& tables = TablesInMemory()) {
  return FloatBits(Exp2(Scale(log, beta), tables));
}

// The bits of (ratio / mass)^beta as float32; log_ratio = log2(ratio); mass > 0; beta in [0, 1] as
// Q62.
GEAR_HOST_DEVICE uint32_t ImportanceBits(int64_t log_ratio, uint64_t mass, uint64_t beta) {
  return ImportanceOfLog(log_ratio - Log2(mass), beta);
}

}  // namespace gear
