#!/usr/bin/env bash
# The API with nothing but curl. URL and KEY in the environment choose another server and key.
set -euo pipefail
url=${URL:-http://127.0.0.1:8000}
auth=(-H "Authorization: Bearer ${KEY:-none-needed}")
json=(-H 'Content-Type: application/json')

echo '# models'
curl -fsS "${auth[@]}" "$url/v1/models"; echo

echo '# a chat reply, whole'
curl -fsS "${auth[@]}" "${json[@]}" "$url/v1/chat/completions" -d '{
  "model": "'"${MODEL:-smollm2}"'", "max_tokens": 40,
  "messages": [{"role": "user", "content": "What is a lighthouse?"}]
}'; echo

echo '# the same, streamed'
curl -fsSN "${auth[@]}" "${json[@]}" "$url/v1/chat/completions" -d '{
  "model": "'"${MODEL:-smollm2}"'", "max_tokens": 40, "stream": true,
  "messages": [{"role": "user", "content": "What is a lighthouse?"}]
}'

echo '# a text completion: greedy, so always the same'
curl -fsS "${auth[@]}" "${json[@]}" "$url/v1/completions" -d '{
  "model": "'"${MODEL:-smollm2}"'", "prompt": "The sea is", "temperature": 0, "max_tokens": 20
}'; echo
