#!/usr/bin/env bash
# Run the tests of an integration with the framework's real package, in an environment of its own below build/envs.
#   bash launch/test_frameworks.sh trl [PYTEST OPTION...]
#   bash launch/test_frameworks.sh openrlhf [PYTEST OPTION...]
# It borrows the packages of .venv; torch and the others that both need keep their versions. The last lines, with the
# versions, are the result that is kept: tests/results/trl.txt, tests/results/openrlhf.txt.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=launch/env.sh
source launch/env.sh
whole=()
alone=()
case "${1:-}" in
  trl)
    tests=(tests/unit/integrations tests/distributed/test_trl.py tests/distributed/test_trl_ledger.py)
    requirement="$(sed -n '/^trl = \[/,/^\]/s/^  "\([^"]*\)".*/\1/p' pyproject.toml)"
    whole=("$requirement" peft)
    packages=(trl peft datasets transformers accelerate deepspeed torch)
    ;;
  openrlhf)
    # Its requirements flash-attn and vllm have no build without a GPU, so that it is installed without them.
    tests=(tests/unit/integrations/test_openrlhf_options.py tests/distributed/test_openrlhf.py)
    versions_of="deepspeed_gear/integrations/openrlhf.py"
    alone=("openrlhf$(sed -n 's/^VERSIONS = "\(.*\)"/\1/p' "$versions_of")" loralib pylatexenc)
    whole=(aiohttp datasets peft ray sympy torchdata)
    packages=(openrlhf ray peft transformers deepspeed torch)
    ;;
  *)
    echo "usage: bash launch/test_frameworks.sh trl|openrlhf [PYTEST OPTION...]" >&2
    exit 2
    ;;
esac
name="$1"
shift
folder="build/envs/$name"
if ! [[ -x "$folder/bin/python" ]]; then
  python -m venv "$folder"
  # What .venv borrows by .pth files counts as installed, too.
  paths='import site, sys; print(*(path for path in sys.path if path.endswith("site-packages")), sep="\n")'
  python -c "$paths" > "$("$folder/bin/python" -c "import sysconfig; print(sysconfig.get_path('purelib'))")/borrowed.pth"
fi
versions="$(mktemp)"
trap 'rm -f "$versions"' EXIT
python -m pip list --format freeze 2>/dev/null | grep -E '^(torch|transformers|accelerate|deepspeed|tokenizers)==' > "$versions"
"$folder/bin/python" -m pip install --quiet --constraint "$versions" "${whole[@]}"
if ((${#alone[@]})); then
  "$folder/bin/python" -m pip install --quiet --no-deps "${alone[@]}"
fi
mkdir -p tests/results
export HF_HUB_OFFLINE=1
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"  # processes that tests start import the package, too
status=0
"$folder/bin/python" -m pytest -q "${tests[@]}" "$@" | tee "build/$name.log" || status=$?
{
  echo "bash launch/test_frameworks.sh $name"
  "$folder/bin/python" -c "
import sys
from importlib.metadata import version
print(*(f'{name} {version(name)}' for name in sys.argv[1:]), sep=', ')" "${packages[@]}"
  grep -E '^[0-9]+ (passed|failed|error|skipped)|^=.* (passed|failed|error).*' "build/$name.log" | tail -1 | sed 's/ in [0-9].*//'
} > "tests/results/$name.txt"
cat "tests/results/$name.txt"
exit "$status"
