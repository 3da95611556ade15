#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Takes a picture of a report with Chromium, by default 1200 pixels wide and as high as the page.
# usage: scripts/screenshot.sh REPORT.html OUT.png [light|dark] [WIDTH] [HEIGHT]
set -euo pipefail
[[ $# -ge 2 && $# -le 5 ]] || { sed -n 's/^# usage: /usage: /p' "$0" >&2; exit 2; }
report=$(realpath -e -- "$1")
picture=$(realpath -m -- "$2")
width=${4:-1200}
case ${3:-light} in
  dark) scheme=0 ;;
  light) scheme=1 ;;
  *) echo "the colours are light or dark, not $3" >&2; exit 2 ;;
esac
command -v chromium >/dev/null || { echo "chromium is not on the PATH" >&2; exit 1; }

profile=$(mktemp -d)
trap 'rm -rf "$profile"' EXIT
# Blocks all network access. The page's errors go to stderr.
browse() {
  chromium --headless=new --no-sandbox --disable-gpu --hide-scrollbars --no-first-run \
    --disable-background-networking --disable-component-update --disable-sync \
    --host-resolver-rules='MAP * ~NOTFOUND' --user-data-dir="$profile" \
    --blink-settings=preferredColorScheme="$scheme" --enable-logging=stderr "$@"
}

# A copy of the page reports its height. It runs in a frame, as windows are never narrower than 500
# pixels.
sed "s|</body>|<script>parent.postMessage(document.documentElement.scrollHeight, '*');</script></body>|" \
  "$report" >"$profile/copy.html"
cat >"$profile/frame.html" <<END
<script>onmessage = message => { document.title = message.data; };</script>
<title></title><iframe width="$width" height="400" style="border: 0" src="copy.html"></iframe>
END
height=$(browse --window-size=1200,800 --virtual-time-budget=5000 --dump-dom \
  "file://$profile/frame.html" 2>/dev/null | sed -n 's|.*<title>\([0-9]*\)</title>.*|\1|p')
[[ -n $height ]] || { echo "chromium could not open $report" >&2; exit 1; }
browse --window-size="$width,${5:-$height}" --screenshot="$picture" "file://$report"
[[ -s $picture ]] || { echo "chromium made no picture of $report" >&2; exit 1; }
