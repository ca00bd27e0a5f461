#!/usr/bin/env bash
# Common requests with curl.  QUIRE_URL and QUIRE_API_KEY name another server and its key.
set -eu -o pipefail
url=${QUIRE_URL:-http://127.0.0.1:8000}

ask() {  # PATH [JSON]: one request, its answer on standard output
  local path=$1
  shift
  if [ $# -gt 0 ]; then set -- -H 'Content-Type: application/json' -d "$1"; fi
  curl --silent --show-error --no-buffer "$url$path" -H "Authorization: Bearer ${QUIRE_API_KEY:-none}" "$@"
  echo
}

echo '# Is a server there, and which model does it serve?'
ask /ready
ask /v1/models
model=$(ask /v1/models | sed 's/^[^[]*\[{"id":"\([^"]*\)".*/\1/')

echo '# A completion'
ask /v1/completions '{"model": "'"$model"'", "prompt": "To be", "max_tokens": 8}'

echo '# A chat, streamed'
ask /v1/chat/completions '{"model": "'"$model"'", "messages": [{"role": "user", "content": "Hello"}],
  "max_completion_tokens": 8, "stream": true, "stream_options": {"include_usage": true}}'

echo '# Two choices for one prompt, with log probabilities'
ask /v1/completions '{"model": "'"$model"'", "prompt": "To be", "max_tokens": 2, "n": 2, "logprobs": 1}'

echo '# How many tokens does a text have?'
ask /tokenize '{"prompt": "To be or not to be"}'

echo '# An error names the field, the limit and the value'
ask /v1/completions '{"model": "'"$model"'", "prompt": "To be", "top_p": 1.5}'
