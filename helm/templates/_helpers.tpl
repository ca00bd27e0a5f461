{{- define "quire.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $own := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- default $own .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- end }}

{{/* Labels that select the pods of one component: (list $ "engine").  Upgrades must not change them. */}}
{{- define "quire.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ default $root.Chart.Name $root.Values.nameOverride }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
{{- with index . 1 }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- end }}

{{- define "quire.labels" -}}
{{ include "quire.selector" . }}
{{- with index . 0 }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}
{{- end }}

{{/* Port of a gateway's metrics.  Metrics name tenants, so it is never the port of clients. */}}
{{- define "quire.gateway.metricsPort" -}}
{{- default 9100 .Values.gateway.config.metrics_port | int -}}
{{- end }}

{{/* 70 % of a memory limit in bytes; empty without a limit.  The rest is for connections' buffers and for the copy that
     the server makes of changed pages while it rewrites its file. */}}
{{- define "quire.redis.maxmemory" -}}
{{- with (.Values.redis.bundled.resources.limits | default dict).memory -}}
{{- $units := dict "" 1 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 -}}
{{- $text := toString . -}}
{{- $unit := regexFind "[A-Za-z]*$" $text -}}
{{- $number := trimSuffix $unit $text -}}
{{- if not (and (hasKey $units $unit) (regexMatch "^[0-9]+([.][0-9]+)?(e[+]?[0-9]+)?$" $number)) -}}
{{- fail (printf "redis.bundled.resources.limits.memory: %s is not an amount of memory, such as 1Gi" $text) -}}
{{- end -}}
{{- printf "%.0f" (floor (mulf (float64 $number) (float64 (get $units $unit)) 0.7)) -}}
{{- end -}}
{{- end }}

{{- define "quire.image" -}}
{{- $root := index . 0 -}}{{- $image := index . 1 -}}
image: {{ printf "%s:%s" $image.repository (default $root.Chart.AppVersion $image.tag) | quote }}
imagePullPolicy: {{ $image.pullPolicy }}
{{- end }}

{{/* Placement of the pods of one component: (list $ "engine" .Values.engine).  By default on different nodes. */}}
{{- define "quire.placement" -}}
{{- $root := index . 0 -}}{{- $component := index . 1 -}}{{- $values := index . 2 -}}
{{- with $values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
affinity:
{{- if $values.affinity }}
  {{- toYaml $values.affinity | nindent 2 }}
{{- else }}
  podAntiAffinity:
    preferredDuringSchedulingIgnoredDuringExecution:
      - weight: 100
        podAffinityTerm:
          topologyKey: kubernetes.io/hostname
          labelSelector:
            matchLabels: {{- include "quire.selector" (list $root $component) | nindent 14 }}
{{- end }}
topologySpreadConstraints:
{{- if $values.topologySpreadConstraints }}
  {{- toYaml $values.topologySpreadConstraints | nindent 2 }}
{{- else }}
  - maxSkew: 1
    topologyKey: topology.kubernetes.io/zone
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{- include "quire.selector" (list $root $component) | nindent 8 }}
{{- end }}
{{- with $values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end }}

{{/* Settings of all pods.  Service links would set QUIRE_PORT=tcp://... beside a Service called quire. */}}
{{- define "quire.pod" -}}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
securityContext: {{- toYaml .Values.podSecurityContext | nindent 2 }}
{{- end }}

{{- define "quire.redis.passwordSecret" -}}
{{- with .Values.redis.bundled.passwordSecret -}}
name: {{ default (printf "%s-redis" (include "quire.fullname" $)) .name }}
key: {{ .key }}
{{- end }}
{{- end }}

{{/* Programs get secrets as environment variables, and all other settings as the file of the ConfigMap. */}}
{{- define "quire.env" -}}
{{- $values := .Values -}}
{{- if $values.redis.bundled.enabled }}
- name: REDIS_PASSWORD
  valueFrom: {secretKeyRef: {{- include "quire.redis.passwordSecret" . | fromYaml | toJson | nindent 4 }}}
- name: QUIRE_REDIS_URL
  value: redis://:$(REDIS_PASSWORD)@{{ include "quire.fullname" . }}-redis:6379/0
{{- else if $values.redis.external.urlSecret.name }}
- name: QUIRE_REDIS_URL
  valueFrom: {secretKeyRef: {{ toJson $values.redis.external.urlSecret }}}
{{- else }}
- name: QUIRE_REDIS_URL
  value: {{ required "redis.external: give url or urlSecret, or set redis.bundled.enabled" $values.redis.external.url }}
{{- end }}
{{- with $values.model.hubTokenSecret }}
{{- if .name }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {{ toJson . }}}
{{- end }}
{{- end }}
# the only writable folders, because the root filesystem is read-only
- {name: HOME, value: /tmp}
- {name: HF_HOME, value: /var/cache/quire/hub}
- {name: XDG_CACHE_HOME, value: /var/cache/quire}
{{- end }}

{{- define "quire.mounts" -}}
- {name: config, mountPath: /etc/quire/quire.toml, subPath: quire.toml, readOnly: true}
- {name: tmp, mountPath: /tmp}
- {name: cache, mountPath: /var/cache/quire}
{{- if .Values.model.volume }}
- {name: models, mountPath: /models, readOnly: true}
{{- end }}
{{- if and (not .Values.redis.bundled.enabled) .Values.redis.external.tlsSecret }}
- {name: redis-tls, mountPath: /etc/quire/redis-tls, readOnly: true}
{{- end }}
{{- end }}

{{- define "quire.volumes" -}}
- {name: config, configMap: {name: {{ include "quire.fullname" . }}}}
- {name: tmp, emptyDir: {}}
{{- with .Values.model.volume }}
- name: models
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if and (not .Values.redis.bundled.enabled) .Values.redis.external.tlsSecret }}
- {name: redis-tls, secret: {secretName: {{ .Values.redis.external.tlsSecret }}, defaultMode: 288}}
{{- end }}
{{- end }}

{{- define "quire.dns" -}}
- ports:
    - {port: 53, protocol: UDP}
    - {port: 53, protocol: TCP}
{{- end }}
