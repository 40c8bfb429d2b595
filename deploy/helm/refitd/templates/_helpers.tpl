{{/* Labels of every object. The first one selects pods, so it never changes. */}}
{{- define "refitd.labels" -}}
app.kubernetes.io/name: refitd
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "refitd.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default (printf "%s%s" .Chart.AppVersion (ternary "-gpu" "" .Values.gpu.enabled)) }}
{{- end }}

{{/* A message of refitd's configuration in text format, from {message, indent}: maps are messages, lists are repeated fields. */}}
{{- define "refitd.textproto" -}}
{{- range $name, $value := .message }}
{{- range $each := ternary $value (list $value) (kindIs "slice" $value) }}
{{- if kindIs "map" $each }}
{{ $.indent }}{{ $name }} {
{{- include "refitd.textproto" (dict "message" $each "indent" (printf "%s  " $.indent)) }}
{{ $.indent }}}
{{- else if kindIs "string" $each }}
{{ $.indent }}{{ $name }}: {{ ternary $each (quote $each) (has $name (list "format" "level" "role" "default_verification" "unix_mode")) }}
{{- else if kindIs "bool" $each }}
{{ $.indent }}{{ $name }}: {{ $each }}
{{- else }}
{{ $.indent }}{{ $name }}: {{ int64 $each }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* The daemon's settings, as YAML named as in daemon/config.proto. */}}
{{- define "refitd.settings" -}}
{{- if and .Values.hostNetwork (not .Values.cluster.enabled) }}
{{- fail "hostNetwork is true, but cluster.enabled is not: network policies do not guard the node's network, certificates do" }}
{{- end }}
{{- if not (or .Values.metrics.insecure .Values.cluster.enabled) }}
{{- fail "metrics.insecure is false, but cluster.enabled is not: without certificates there is no TLS" }}
{{- end }}
{{- $settings := deepCopy .Values.settings }}
{{- $_ := mergeOverwrite $settings (dict
    "listen" (dict "unix_path" "/run/refitd/refitd.sock" "unix_mode" "0660")
    "metrics" (dict "listen" (printf "0.0.0.0:%d" (int .Values.metrics.port)) "insecure" .Values.metrics.insecure)
    "rules_file" "/etc/refitd-rules/rules.textproto") }}
{{- if .Values.metrics.page }}
{{- $_ := set $settings.metrics "page" true }}
{{- end }}
{{- if .Values.cluster.enabled }}
{{- with .Values.cluster }}
{{- $_ := mergeOverwrite $settings (deepCopy .settings) (dict
    "listen" (dict "tcp" (printf "0.0.0.0:%d" (int .ports.control)))
    "peers" (dict "listen" (printf "0.0.0.0:%d" (int .ports.links))
        "identity" (printf "spiffe://%s/refitd/*" .trustDomain) "interface" .interface)
    "data" (dict "port" .ports.data)
    "tls" (dict "certificate" "/etc/refitd-tls/tls.crt" "key" "/etc/refitd-tls/tls.key" "roots" "/etc/refitd-tls/ca.crt")) }}
{{- end }}
{{- end }}
{{- toYaml $settings }}
{{- end }}

{{/* Who may do what, named likewise. */}}
{{- define "refitd.rules" -}}
{{- $rules := list }}
{{- range $rule := ternary (concat .Values.cluster.rules .Values.rules) .Values.rules .Values.cluster.enabled }}
{{- $rules = append $rules (set (deepCopy $rule) "who" (tpl $rule.who $)) }}
{{- end }}
{{- toYaml (dict "allowed_gids" (ternary list .Values.allowedGids .Values.cluster.enabled) "rule" $rules) }}
{{- end }}

{{/* Probes ask over the unix socket, as members do. */}}
{{- define "refitd.probe" -}}
exec:
  command: ["refitctl", "--timeout", "4", "status"]
periodSeconds: {{ .period }}
timeoutSeconds: 5
failureThreshold: {{ .failures }}
{{- end }}

{{- define "refitd.confined" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: ["ALL"]
{{- end }}
