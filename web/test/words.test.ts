import assert from "node:assert/strict";
import { test } from "node:test";

import { ORIGINS, originOf, packageOf } from "../src/colors";
import { humanBytes, percent, printable, seconds, shortName, signedBytes, utc } from "../src/format";

test("bytes are in units of 1024, as the command line writes them", () => {
  const cases: [number, string][] = [
    [0, "0 B"], [1023, "1023 B"], [1024, "1.0 KiB"], [1536, "1.5 KiB"], [81_352_720_384, "75.8 GiB"],
    [1024 ** 2 - 1, "1.0 MiB"], [-2048, "-2.0 KiB"], [2 ** 50, "1.0 PiB"],
  ];
  for (const [bytes, text] of cases) assert.equal(humanBytes(bytes), text);
  assert.equal(signedBytes(1024), "+1.0 KiB");
  assert.equal(signedBytes(0), "0 B");
});

test("percent and times", () => {
  assert.equal(percent(1, 3), "33.3 %");
  assert.equal(percent(1, 0), "-");
  assert.equal(seconds(1.23456, 10), "1.2 s");
  assert.equal(utc(1_700_000_000_123_456), "2023-11-14 22:13:20.123 UTC");
  assert.equal(utc(NaN), "");
});

test("what would turn or hide text is shown", () => {
  assert.equal(printable("a\u202eb\n\u0007"), "a\\u202eb\\u000a\\u0007");
  assert.equal(printable("plain <b>"), "plain <b>");
});

test("of a C++ name the last parts stay", () => {
  assert.equal(shortName("torch::autograd::generated::MmBackward0::apply(std::vector<at::Tensor>&&)"), "MmBackward0::apply");
  assert.equal(shortName("at::(anonymous namespace)::structured_mm_out_cuda::set_output(long, c10::IntArrayRef)"), "structured_mm_out_cuda::set_output");
  assert.equal(shortName("void torch::autograd::check<at::Tensor>(int)"), "autograd::check");
  assert.equal(shortName("train.py:main"), "train.py:main");
  assert.notEqual(shortName("::"), "");
});

test("packages and origins", () => {
  const cases: [string, string, string, string][] = [
    ["adam.py:step", "/venv/lib/python3.11/site-packages/torch/optim/adam.py", "torch", "torch"],
    ["train.py:main", "/workspace/train.py", "train.py", "your code"],
    ["threading.py:run", "/usr/lib/python3.11/threading.py", "standard library", "standard library"],
    ["modeling.py:forward", "/v/site-packages/transformers/modeling.py", "transformers", "other packages"],
    ["at::native::empty_cuda(long)", "??", "at (native)", "native"],
    ["torch.nn.modules.linear.Linear.forward", "linear.py", "torch", "torch"],
    ["x.py:call", "/tmp/torchinductor_root/ab/x.py", "inductor", "torch"],
    ["x.py:call", "C:\\v\\Lib\\site-packages\\torch\\x.py", "torch", "torch"],
    ["[backward]", "", "no stack", "no stack"],
  ];
  for (const [name, file, owner, origin] of cases) {
    assert.equal(packageOf(name, file), owner, name);
    assert.equal(ORIGINS[originOf(name, file)], origin, name);
  }
});
