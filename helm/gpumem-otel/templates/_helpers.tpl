{{- define "gpumem-otel.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{/* 52 characters: the names of the objects add up to eleven to it. */}}
{{- define "gpumem-otel.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 52 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 52 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 52 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/*
Labels of every object: list of the root and of labels of its own. None of the chart's is ever in a
selector: what selects objects of this chart does so by a label of its own.
*/}}
{{- define "gpumem-otel.labels" -}}
{{- $root := index . 0 -}}
{{- $chart := dict
  "helm.sh/chart" (printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_")
  "app.kubernetes.io/name" (include "gpumem-otel.name" $root)
  "app.kubernetes.io/instance" $root.Release.Name
  "app.kubernetes.io/version" $root.Chart.AppVersion
  "app.kubernetes.io/managed-by" $root.Release.Service
-}}
{{- merge $chart (index . 1) $root.Values.commonLabels | toYaml -}}
{{- end -}}

{{/* Cluster-wide names: two releases of one name may live in two namespaces. */}}
{{- define "gpumem-otel.clusterName" -}}
{{- printf "%s-%s" .Release.Namespace (include "gpumem-otel.fullname" .) -}}
{{- end -}}

{{- define "gpumem-otel.tokenSecret" -}}
{{- default (printf "%s-token" (include "gpumem-otel.fullname" .)) .Values.token.existingSecret -}}
{{- end -}}

{{/* Pods that are taken in, as a LabelSelector. */}}
{{- define "gpumem-otel.injectSelector" -}}
{{- $selector := deepCopy (default (dict "matchLabels" (dict "gpumem-otel/inject" "true")) .Values.inject.podSelector) -}}
{{- $off := dict "key" "gpumem-otel/inject" "operator" "NotIn" "values" (list "false") -}}
{{- $_ := set $selector "matchExpressions" (append (default list $selector.matchExpressions) $off) -}}
{{- toJson $selector -}}
{{- end -}}

{{/*
What control comes to, as JSON: namespaces (none where it is off), port (0 without TCP), secret (""
where no tokens are used), generated. The job checks all of it again before it listens.
*/}}
{{- define "gpumem-otel.control" -}}
{{- $c := .Values.control -}}
{{- $made := dict "namespaces" list "port" 0 "secret" "" "generated" false -}}
{{- if $c.enabled -}}
{{- $_ := set $made "namespaces" (default (list .Release.Namespace) $c.namespaces) -}}
{{- end -}}
{{- if and $c.enabled $c.port -}}
{{- $port := int $c.port -}}
{{- if and (not $c.tls.existingSecret) (not $c.insecure) -}}
{{- fail "control.port needs control.tls.existingSecret, or whoever sees the traffic has the token; control.insecure=true where something else encrypts it" -}}
{{- end -}}
{{- if and $c.tls.existingSecret $c.insecure -}}
{{- fail "control.tls.existingSecret and control.insecure=true exclude each other: take one out" -}}
{{- end -}}
{{- if and $c.tls.clientCaKey (not $c.tls.existingSecret) -}}
{{- fail "control.tls.clientCaKey needs control.tls.existingSecret" -}}
{{- end -}}
{{- if and $c.tls.clientRoles (not $c.tls.clientCaKey) -}}
{{- fail "control.tls.clientRoles needs control.tls.clientCaKey" -}}
{{- end -}}
{{- if not (or $c.existingSecret $c.roles $c.tls.clientRoles) -}}
{{- fail "control.port needs credentials: control.roles, control.existingSecret, or control.tls.clientRoles" -}}
{{- end -}}
{{- if and (lt $port (add .Values.port 8 | int)) (lt (int .Values.port) (add $port 8 | int)) -}}
{{- fail (printf "control.port %d and port %d overlap: each takes eight ports" $port (int .Values.port)) -}}
{{- end -}}
{{- $_ := set $made "port" $port -}}
{{- if or $c.existingSecret $c.roles -}}
{{- $_ := set $made "secret" (default (printf "%s-control" (include "gpumem-otel.fullname" .)) $c.existingSecret) -}}
{{- $_ := set $made "generated" (not $c.existingSecret) -}}
{{- end -}}
{{- end -}}
{{- toJson $made -}}
{{- end -}}

{{- define "gpumem-otel.injectImage" -}}
{{- with .Values.inject.image -}}
{{- $repository := required "inject.image.repository is needed: the image built from helm/inject/Dockerfile" .repository -}}
{{- if .digest -}}
{{- printf "%s@%s" $repository .digest -}}
{{- else -}}
{{- printf "%s:%s" $repository (default $.Chart.AppVersion .tag) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "gpumem-otel.alloyImage" -}}
{{- with .Values.alloy.image -}}
{{- if .digest -}}
{{- printf "%s@%s" .repository .digest -}}
{{- else -}}
{{- printf "%s:%s" .repository .tag -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Settings of every injected pod, as a list of name and value. $(...) is filled in by the kubelet. */}}
{{- define "gpumem-otel.injectEnv" -}}
{{- $env := list (list "GPUMEM_OTEL_SERVE" "1") (list "GPUMEM_OTEL_HOST" "$(POD_IP)") -}}
{{- $env = append $env (list "GPUMEM_OTEL_PORT" (.Values.port | int | toString)) -}}
{{- if .Values.token.enabled -}}
{{- $env = append $env (list "GPUMEM_OTEL_TOKEN_FILE" (printf "/gpumem-otel-token/%s" .Values.token.key)) -}}
{{- end -}}
{{- $seen := dict -}}
{{- range .Values.inject.env -}}
{{- if hasKey $seen .name -}}
{{- fail (printf "inject.env has %s twice" .name) -}}
{{- end -}}
{{- $_ := set $seen .name true -}}
{{- $env = append $env (list .name .value) -}}
{{- end -}}
{{- toJson $env -}}
{{- end -}}

{{/* The same for pods that take commands. */}}
{{- define "gpumem-otel.controlEnv" -}}
{{- $env := list (list "GPUMEM_OTEL_CONTROL" "1") -}}
{{- $made := include "gpumem-otel.control" . | fromJson -}}
{{- with .Values.control -}}
{{- if $made.port -}}
{{- $env = append $env (list "GPUMEM_OTEL_CONTROL_HOST" "$(POD_IP)") -}}
{{- $env = append $env (list "GPUMEM_OTEL_CONTROL_PORT" (int $made.port | toString)) -}}
{{- if $made.secret -}}
{{- $env = append $env (list "GPUMEM_OTEL_CONTROL_TOKEN_FILE" "/gpumem-otel-control/tokens") -}}
{{- end -}}
{{- if .insecure -}}
{{- $env = append $env (list "GPUMEM_OTEL_CONTROL_INSECURE" "1") -}}
{{- else -}}
{{- $env = append $env (list "GPUMEM_OTEL_CONTROL_TLS_CERT_FILE" "/gpumem-otel-control-tls/tls.crt") -}}
{{- $env = append $env (list "GPUMEM_OTEL_CONTROL_TLS_KEY_FILE" "/gpumem-otel-control-tls/tls.key") -}}
{{- if .tls.clientCaKey -}}
{{- $env = append $env (list "GPUMEM_OTEL_CONTROL_TLS_CLIENT_CA_FILE" "/gpumem-otel-control-tls/ca.crt") -}}
{{- end -}}
{{- if .tls.clientRoles -}}
{{- $env = append $env (list "GPUMEM_OTEL_CONTROL_CLIENT_ROLES" (join "," .tls.clientRoles)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toJson $env -}}
{{- end -}}

{{/*
Their volumes, as a list of: name, Secret, and a list of key and file. Only the keys that are used:
a Secret may hold more than the job's business.
*/}}
{{- define "gpumem-otel.controlVolumes" -}}
{{- $volumes := list -}}
{{- $made := include "gpumem-otel.control" . | fromJson -}}
{{- with .Values.control -}}
{{- if $made.secret -}}
{{- $volumes = append $volumes (list "gpumem-otel-control" $made.secret (list (list .key "tokens"))) -}}
{{- end -}}
{{- if and $made.port .tls.existingSecret -}}
{{- $files := list (list .tls.certKey "tls.crt") (list .tls.keyKey "tls.key") -}}
{{- with .tls.clientCaKey -}}
{{- $files = append $files (list . "ca.crt") -}}
{{- end -}}
{{- $volumes = append $volumes (list "gpumem-otel-control-tls" .tls.existingSecret $files) -}}
{{- end -}}
{{- end -}}
{{- toJson $volumes -}}
{{- end -}}
