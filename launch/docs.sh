#!/usr/bin/env bash
# Build the site of docs/ in build/site; with --serve also serve it on http://127.0.0.1:8000 until Ctrl-C.
#
#   bash launch/docs.sh [--serve [PORT]]
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"
bash launch/setup.sh
source launch/env.sh
version="$(python -c 'import importlib.metadata; print(importlib.metadata.version("deepspeed_gear"))')"
commit="$(git rev-parse --short HEAD 2>/dev/null || echo "no git checkout")"
export GEAR_SITE_FOOTER="deepspeed_gear $version, commit $commit"
export NO_MKDOCS_2_WARNING=1 # MkDocs is pinned below 2
python docs/hooks/site_pages.py build/pages
python -m mkdocs build --strict
case "${1:-}" in
"") echo "docs.sh: the site is build/site/index.html; --serve shows it" ;;
--serve) exec python -m http.server "${2:-8000}" --bind 127.0.0.1 --directory build/site ;;
*)
  echo "docs.sh: error: argument must be --serve [PORT], got $1" >&2
  exit 2
  ;;
esac
